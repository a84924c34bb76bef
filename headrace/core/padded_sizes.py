# SPDX-License-Identifier: Apache-2.0
"""Which shapes steps are padded to, so that each runs as a CUDA graph captured before. Integers only."""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from headrace.config.resolve import ResolvedConfig

DECODE_STEPS = ((16, 4), (64, 8), (256, 16), (512, 32), (1024, 64), (1 << 30, 128))
"""(up to, in steps of), past the powers of two: the wider a batch, the less a few rows of padding cost."""
MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Tokens of steps with prefill. Above the last a step takes longer on the GPU than its launches on the host."""


class PaddedSize(NamedTuple):
    """The shape a step's body runs in."""

    num_tokens: int
    num_rows: int
    is_decode: bool
    """Every row has one token at most."""


def decode_sizes(max_batch_size: int) -> list[int]:
    """Batch sizes to run decode steps in: 1, 2, 4, 8, 12, 16, then denser than doubling, up to the largest itself."""
    sizes = [n for n in (1, 2) if n < max_batch_size]
    size = 4
    while size < max_batch_size:
        sizes.append(size)
        size += next(step for up_to, step in DECODE_STEPS if size < up_to)
    return [*sizes, max_batch_size]


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """Token counts to run steps with prefill in."""
    return [n for n in MIXED_SIZES if n <= max_num_tokens]


def graph_sizes(config: ResolvedConfig) -> "PaddedSizes | None":
    """The shapes that steps run in as CUDA graphs, by the settings; None: none do."""
    graphs = config.args.cuda_graph_config
    if config.device != "cuda" or graphs is None:
        return None
    most = min(graphs.max_batch_size or config.max_batch_size, config.max_batch_size)
    return PaddedSizes(
        config.max_batch_size,
        decode_sizes(most) if graphs.batch_sizes is None else graphs.batch_sizes,
        mixed_sizes(config.max_num_tokens) if graphs.mixed_num_tokens is None else graphs.mixed_num_tokens,
        enable_padding=graphs.enable_padding,
    )


class PaddedSizes:
    """The sizes of one engine, and the smallest that a step fits in."""

    def __init__(
        self, max_batch_size: int, decode: Iterable[int], mixed: Iterable[int], *, enable_padding: bool = True
    ) -> None:
        """decode: batch sizes. mixed: token counts. enable_padding: a step may run in a larger size than its own."""
        self._max_batch_size = max_batch_size
        self.decode = sorted({n for n in decode if n <= max_batch_size})
        self.mixed = sorted(set(mixed))
        self._enable_padding = enable_padding

    def body_sizes(self) -> list[PaddedSize]:
        """Every shape of a body."""
        decode = [PaddedSize(n, n, True) for n in self.decode]
        return decode + [self._mixed(n) for n in self.mixed]

    def of_body(self, num_tokens: int, num_rows: int, *, is_decode: bool) -> PaddedSize | None:
        """The smallest shape for a step; None where it fits in none."""
        if is_decode:
            found = self._smallest(self.decode, num_rows)
            if found is not None:
                return PaddedSize(found, found, True)
        found = self._smallest(self.mixed, num_tokens)
        return None if found is None else self._mixed(found)

    def of_head(self, num_rows: int) -> int | None:
        """The smallest number of rows for a head and its sampler."""
        return self._smallest(self.decode, num_rows)

    def _mixed(self, num_tokens: int) -> PaddedSize:
        return PaddedSize(num_tokens, min(num_tokens, self._max_batch_size), False)

    def _smallest(self, sizes: list[int], least: int) -> int | None:
        at = bisect.bisect_left(sizes, least)
        if at == len(sizes) or not (self._enable_padding or sizes[at] == least):
            return None
        return sizes[at]
