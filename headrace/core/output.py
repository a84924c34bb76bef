# SPDX-License-Identifier: Apache-2.0
"""The border between control and compute: what goes down to the workers, and what comes back.

A plan is a delta against the worker's request rows: a row keeps its tokens, lengths, block table and sampling
settings on the device from the plan that admits it to the plan that frees it. For a running row a plan holds
ceilings only; true positions and last tokens live on the device, so a plan can be launched before the results of
the plans ahead of it are known. A worker carries plans out in the order they are launched.
"""

import msgspec

from headrace.core.request import SamplingSpec


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that takes a row with this plan: on first admission, and again when it resumes after preemption."""

    row: int
    token_ids: list[int]
    """Prompt tokens, then the output tokens known so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is already in `block_ids` (prefix reuse)."""
    block_ids: tuple[list[int], ...]
    """The row's block table, one list per KV group."""
    sampling: SamplingSpec


class BlockAppend(msgspec.Struct, frozen=True, gc=False):
    """Blocks that extend a row's block table, from entry `start` on."""

    row: int
    group: int
    start: int
    block_ids: list[int]


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """What one row does in this step."""

    row: int
    num_tokens: int
    """Tokens to run, from the row's `num_computed_tokens` on the device: 1 for a decode, the chunk for a prefill."""
    samples: bool
    """Whether the last of these tokens is the newest known one, so that a token is sampled."""
    start: int
    """The position of the first of these tokens, as the host reckons it (exact where no draft tokens are in flight)."""


class CachePlan(msgspec.Struct, frozen=True):
    """Block copies to carry out before the step, each (group, source block, destination block).

    In their order: one may read what an earlier one wrote. A source is no block that the same plan hands to a row.
    """

    device_copies: list[tuple[int, int, int]] = []


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step. Order of execution: free rows, admit, append blocks, cache plan, then run the rows.

    Its rows are those of `decode_rows`, then those of `chunks`; none stands here twice. A row's place is its index in
    that order.
    """

    step_id: int
    freed_rows: list[int]
    admitted: list[AdmittedRequest]
    appended_blocks: list[BlockAppend]
    cache_plan: CachePlan
    chunks: list[ScheduledRow]
    """Rows that run part of a prefill; those with one token first."""
    decode_rows: list[int] = []
    """Rows that run one token, their newest, and sample the next."""
    decode_starts: list[int] = []
    """Of each of these the position of that token, as `ScheduledRow.start`."""

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens this step runs, over all rows."""
        return len(self.decode_rows) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def scheduled(self) -> list[ScheduledRow]:
        """All rows alike, made on each call: for what happens seldom."""
        decodes = zip(self.decode_rows, self.decode_starts, strict=True)
        return [ScheduledRow(row, 1, True, start) for row, start in decodes] + self.chunks


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, the chosen token first, then the top ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1 is the most probable token of the vocabulary."""


class ModelOutput(msgspec.Struct, frozen=True, gc=False):
    """The results of one plan. Keys are places in the plan; what most rows have not is kept for those that have it."""

    step_id: int
    token_ids: list[int]
    """The tokens sampled, in the order of the plan's rows."""
    counts: list[int] | None = None
    """How many of them are each row's, over all rows; None: one of each row that samples, whatever became of it."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """One per sampled token, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """One per token of this chunk whose successor is a prompt token: entry i speaks of prompt token start + i + 1."""
    errors: dict[int, str] = {}
    """Why a row failed: its tokens are void, its request ends, the others go on."""


class RequestDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one request: the core's answer to the front end.

    A request's last delta has a `finish_reason`; after an abort or `finish` there is none at all.
    """

    request_id: str
    new_token_ids: list[int]
    """The end-of-sequence or stop token that ended the request included."""
    finish_reason: str | None = None
    """None: goes on. "stop", "length" or "error"."""
    stop_reason: int | str | None = None
    """The user's stop token that ended the request; None after end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One per new token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The next prompt positions, from the second prompt token on, each position once."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came out of the prefix cache when the request first ran."""
    error: str | None = None
    """The sentence that goes with finish_reason "error"."""
