# SPDX-License-Identifier: Apache-2.0
"""How long a request's blocks should stay in the prefix cache: `KvCacheRetentionConfig` in plain numbers."""

from bisect import bisect_right

import msgspec

from headrace.kv_cache_retention import DEFAULT_PRIORITY as DEFAULT_PRIORITY

PriorityAndDuration = tuple[int, int | None]
"""A priority, and the milliseconds after which it falls back to `DEFAULT_PRIORITY`; None: never."""


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What a request asks for: ranges of its prompt, and its output."""

    ranges: list[tuple[int, int, int, int | None]] = []
    """(first token, end, priority, duration in ms or None), in order, without overlaps, within the prompt."""
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    def of_block(self, first_token: int, num_prompt_tokens: int) -> PriorityAndDuration:
        """What the block that begins at position `first_token` gets.

        TensorRT-LLM's rule: a block's first token decides, however many ranges the rest of it lies in. So the block in
        which the prompt ends is the prompt's, and blocks that begin behind it are the output's.
        """
        if first_token >= num_prompt_tokens:
            return self.decode_priority, self.decode_duration_ms
        place = bisect_right(self.ranges, first_token, key=lambda each: each[0])
        if place:
            _, end, priority, duration_ms = self.ranges[place - 1]
            if first_token < end:
                return priority, duration_ms
        return DEFAULT_PRIORITY, None
