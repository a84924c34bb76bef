# SPDX-License-Identifier: Apache-2.0
"""One step's tensors, gathered on the device from the rows into buffers that stay where they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.attention.base import AttentionMetadata
from headrace.core.output import ScheduledRow, SchedulerOutput
from headrace.kernels.batch_prep import gather_blocks, gather_tokens
from headrace.utils.math import cdiv
from headrace.worker.request_state import RequestState, RowSettings
from headrace.worker.upload import StepWords


@dataclass(slots=True)
class Subset:
    """Some of a step's sampling rows: those that need one piece of work."""

    places: list[int]
    """Which of the sampling rows."""
    rows: list[int]
    """Their rows in the state."""
    is_all: bool = False
    where: tuple[slice, slice] | None = None
    """Where `places` and `rows` are in the step's words; None where the subset is all sampling rows."""
    place_index: Tensor | None = None
    """`places` on the device; None where the subset is all sampling rows: nothing need be picked."""
    row_index: Tensor | None = None
    """`rows` on the device."""

    def pick(self, values: Tensor) -> Tensor:
        """This subset's rows of a tensor over all sampling rows: the tensor itself where that is all of them."""
        return values if self.place_index is None else values[self.place_index]


@dataclass(slots=True)
class SamplingRows:
    """The rows of a step that sample, and which of them need more than an argmax."""

    places: list[int]
    """Index of each in the plan's `scheduled`."""
    rows: Subset
    penalised: Subset | None
    biased: Subset | None
    banned: Subset | None
    random: Subset | None
    logprobs: Subset | None
    max_len: int
    """At least the known tokens of any penalised row."""
    num_candidates: int
    """What `filter_threshold` needs to look at; see there."""
    has_filters: bool
    ban_width: int
    bias_width: int
    num_top: int
    """The most top log-probabilities that a row wants."""


@dataclass(slots=True)
class PromptChunk:
    """The part of a prefill chunk whose next tokens are prompt tokens, of a row that wants their log-probabilities."""

    place: int
    """Index in the plan's `scheduled`."""
    row: int
    start: int
    """Position of the chunk's first token."""
    first: int
    """Where its hidden states begin among the step's."""
    count: int
    num_top: int


@dataclass(slots=True)
class StepBatch:
    """A step as the model and the sampler see it."""

    num_tokens: int
    num_rows: int
    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    rows: Tensor
    """int32 [num_rows], rows of the state."""
    logits_index: Tensor | None
    """Which hidden states the head needs; None: all, in order."""
    sampling: SamplingRows | None
    prompt_chunks: list[PromptChunk]


def sampling_rows(
    scheduled: Sequence[ScheduledRow], settings: Sequence[RowSettings | None], vocab_size: int
) -> SamplingRows | None:
    """Sort a step's sampling rows by the work they need; None where no row samples."""
    places = [place for place, row in enumerate(scheduled) if row.samples]
    if not places:
        return None
    picked = [(scheduled[place].row, _known(settings, scheduled[place].row)) for place in places]

    def subset(wants: Callable[[RowSettings], Any]) -> Subset | None:
        some = [(place, row) for place, (row, has) in enumerate(picked) if wants(has)]
        if not some:
            return None
        return Subset([place for place, _ in some], [row for _, row in some], len(some) == len(places))

    everything = Subset(list(range(len(places))), [row for row, _ in picked], True)
    logprobs = subset(lambda has: has.logprobs is not None)
    num_top = max((has.logprobs or 0 for _, has in picked), default=0)
    if all(has.is_plain for _, has in picked):
        return SamplingRows(places, everything, None, None, None, None, logprobs, 0, 0, False, 0, 0, num_top)
    noisy = [has for _, has in picked if not has.is_greedy]
    if any(has.has_top_p and not has.top_k for has in noisy):
        num_candidates = vocab_size
    else:
        num_candidates = min(max((has.top_k for has in noisy), default=0), vocab_size)
    return SamplingRows(
        places=places,
        rows=everything,
        penalised=subset(lambda has: has.has_penalties),
        biased=subset(lambda has: has.num_bias),
        banned=subset(lambda has: has.num_banned),
        random=subset(lambda has: not has.is_greedy),
        logprobs=logprobs,
        max_len=max(scheduled[place].start + scheduled[place].num_tokens for place in places),
        num_candidates=num_candidates,
        has_filters=num_candidates > 0 or any(has.has_min_p for has in noisy),
        ban_width=max(has.num_banned for _, has in picked),
        bias_width=max(has.num_bias for _, has in picked),
        num_top=num_top,
    )


def _known(settings: Sequence[RowSettings | None], row: int) -> RowSettings:
    has = settings[row]
    assert has is not None, f"row {row} is scheduled but was never admitted"
    return has


def prompt_chunks(scheduled: Sequence[ScheduledRow], settings: Sequence[RowSettings | None]) -> list[PromptChunk]:
    """The chunks of this step whose prompt log-probabilities are wanted."""
    chunks = []
    first = 0
    for place, row in enumerate(scheduled):
        has = _known(settings, row.row)
        if has.prompt_logprobs is not None:
            count = min(row.num_tokens, has.num_prompt_tokens - 1 - row.start)
            if count > 0:
                chunks.append(PromptChunk(place, row.row, row.start, first, count, has.prompt_logprobs))
        first += row.num_tokens
    return chunks


class InputBatch:
    """Buffers for the largest step, filled anew for each one: `stage` on the host, then `gather` on the device."""

    def __init__(self, state: RequestState, max_num_tokens: int, tokens_per_block: int, vocab_size: int) -> None:
        device = state.words.device
        num_rows = state.records.shape[0]
        self._state = state
        self._tokens_per_block = tokens_per_block
        self._vocab_size = vocab_size
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._slots = [torch.zeros_like(self._input_ids) for _ in state.block_tables]
        self._tables = [torch.zeros_like(table) for table in state.block_tables]
        self._gather_tokens = gather_tokens.choose(device.type)
        self._gather_blocks = gather_blocks.choose(device.type)
        self._where: dict[str, slice] = {}

    def stage(self, plan: SchedulerOutput, words: StepWords) -> SamplingRows | None:
        """Stage the lists of a step: rows, query starts, rows of the logits, and each subset of the sampling rows."""
        scheduled = plan.scheduled
        starts = [0]
        for row in scheduled:
            starts.append(starts[-1] + row.num_tokens)
        sampling = sampling_rows(scheduled, self._state.settings, self._vocab_size)
        self._where = {
            "rows": words.read(row.row for row in scheduled),
            "starts": words.read(starts),
        }
        if sampling is None:
            return None
        if len(sampling.places) < starts[-1]:
            self._where["logits"] = words.read(starts[place + 1] - 1 for place in sampling.places)
        for subset in _subsets(sampling):
            if subset is sampling.rows or not subset.is_all:
                subset.where = words.read(subset.places), words.read(subset.rows)
        return sampling

    def gather(self, plan: SchedulerOutput, words: StepWords, sampling: SamplingRows | None) -> StepBatch:
        """Fill the buffers for a step whose words have been sent."""
        scheduled = plan.scheduled
        num_rows, num_tokens = len(scheduled), plan.num_tokens
        max_query_len = max(row.num_tokens for row in scheduled)
        max_seq_len = max(row.start + row.num_tokens for row in scheduled)
        rows = words.view(self._where["rows"])
        starts = self._query_start_loc[: num_rows + 1]
        starts.copy_(words.view(self._where["starts"]))
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        seq_lens = self._seq_lens[:num_rows]
        state, per_block = self._state, self._tokens_per_block
        self._gather_tokens(
            rows, starts, state.num_computed_tokens, state.token_ids, num_tokens, max_query_len, input_ids, positions,
            seq_lens,
        )  # fmt: skip
        width = cdiv(max_seq_len, per_block)
        tables, slots = [], []
        for group, table in enumerate(state.block_tables):
            tables.append(self._tables[group][:num_rows, : min(width, table.shape[1])])
            slots.append(self._slots[group][:num_tokens])
            self._gather_blocks(
                rows, starts, positions, table, per_block, num_tokens, max_query_len, slots[-1], tables[-1]
            )
        metadata = AttentionMetadata(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=sum(row.num_tokens == 1 for row in scheduled),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc=starts,
            seq_lens=seq_lens,
            positions=positions,
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
        )
        logits_index = None
        if sampling is not None:
            if len(sampling.places) < num_tokens:
                logits_index = words.view(self._where["logits"])
            _bind(sampling, words)
        chunks = prompt_chunks(scheduled, state.settings)
        return StepBatch(num_tokens, num_rows, input_ids, positions, metadata, rows, logits_index, sampling, chunks)


def _subsets(sampling: SamplingRows) -> list[Subset]:
    """Every subset there is; the whole first."""
    some = (sampling.penalised, sampling.biased, sampling.banned, sampling.random, sampling.logprobs)
    return [sampling.rows, *(subset for subset in some if subset is not None)]


def _bind(sampling: SamplingRows, words: StepWords) -> None:
    """Give the subsets their tensors."""
    for subset in _subsets(sampling):
        if subset.where is not None:
            subset.row_index = words.view(subset.where[1])
            subset.place_index = None if subset.is_all else words.view(subset.where[0])
        else:
            subset.row_index = sampling.rows.row_index
