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
class StagedStep:
    """What `InputBatch.stage` counted, and where in the step's words it put the step's lists."""

    num_tokens: int
    num_rows: int
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    rows: slice
    starts: slice
    logits: slice | None
    """None where every token's hidden state is one the head needs."""
    sampling_rows: slice | None
    """None where no row samples."""
    sampling: SamplingRows | None
    prompt_chunks: list[PromptChunk]


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


def plain_rows(places: list[int], rows: list[int]) -> SamplingRows:
    """Sampling rows that all need an argmax and nothing else."""
    everything = Subset(list(range(len(places))), rows, True)
    return SamplingRows(places, everything, None, None, None, None, None, 0, 0, False, 0, 0, 0)


def sampling_rows(
    scheduled: Sequence[ScheduledRow], places: list[int], settings: Sequence[RowSettings | None], vocab_size: int
) -> SamplingRows:
    """Sort a step's sampling rows by the work they need. places: which of `scheduled` sample."""
    picked = [(scheduled[place].row, _known(settings, scheduled[place].row)) for place in places]

    def subset(wants: Callable[[RowSettings], Any]) -> Subset | None:
        some = [(place, row) for place, (row, has) in enumerate(picked) if wants(has)]
        if not some:
            return None
        return Subset([place for place, _ in some], [row for _, row in some], len(some) == len(places))

    everything = Subset(list(range(len(places))), [row for row, _ in picked], True)
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
        logprobs=subset(lambda has: has.logprobs is not None),
        max_len=max(scheduled[place].start + scheduled[place].num_tokens for place in places),
        num_candidates=num_candidates,
        has_filters=num_candidates > 0 or any(has.has_min_p for has in noisy),
        ban_width=max(has.num_banned for _, has in picked),
        bias_width=max(has.num_bias for _, has in picked),
        num_top=max(has.logprobs or 0 for _, has in picked),
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

    def stage(self, plan: SchedulerOutput, words: StepWords) -> StagedStep:
        """Stage the lists of a step: rows, query starts, rows of the logits, and each subset of the sampling rows."""
        scheduled, state = plan.scheduled, self._state
        rows: list[int] = []
        starts, places, last_tokens = [0], list[int](), list[int]()
        num_tokens = num_decode_rows = max_query_len = max_seq_len = 0
        for place, row in enumerate(scheduled):
            count = row.num_tokens
            num_tokens += count
            rows.append(row.row)
            starts.append(num_tokens)
            if row.samples:
                places.append(place)
                last_tokens.append(num_tokens - 1)
            if count == 1:
                num_decode_rows += 1
            if count > max_query_len:
                max_query_len = count
            if row.start + count > max_seq_len:
                max_seq_len = row.start + count
        staged = StagedStep(
            num_tokens=num_tokens,
            num_rows=len(rows),
            num_decode_rows=num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            rows=words.read(rows),
            starts=words.read(starts),
            logits=words.read(last_tokens) if places and len(places) < num_tokens else None,
            sampling_rows=None,
            sampling=None,
            prompt_chunks=prompt_chunks(scheduled, state.settings) if state.num_prompt_scored else [],
        )
        if places:
            self._stage_sampling(staged, scheduled, rows, places, words)
        return staged

    def _stage_sampling(
        self,
        staged: StagedStep,
        scheduled: Sequence[ScheduledRow],
        rows: list[int],
        places: list[int],
        words: StepWords,
    ) -> None:
        """The sampling rows and their subsets. A list that is the step's rows, or all sampling rows, is sent once."""
        state = self._state
        is_every_row = len(places) == len(rows)
        if state.num_not_plain:
            sampling = sampling_rows(scheduled, places, state.settings, self._vocab_size)
        else:
            sampling = plain_rows(places, rows if is_every_row else [rows[place] for place in places])
        staged.sampling = sampling
        staged.sampling_rows = staged.rows if is_every_row else words.read(sampling.rows.rows)
        for subset in _subsets(sampling):
            if not subset.is_all:
                subset.where = words.read(subset.places), words.read(subset.rows)

    def gather(self, words: StepWords, staged: StagedStep) -> StepBatch:
        """Fill the buffers for a step whose words have been sent."""
        num_rows, num_tokens, max_query_len = staged.num_rows, staged.num_tokens, staged.max_query_len
        rows = words.view(staged.rows)
        starts = self._query_start_loc[: num_rows + 1]
        starts.copy_(words.view(staged.starts))
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        seq_lens = self._seq_lens[:num_rows]
        state, per_block = self._state, self._tokens_per_block
        self._gather_tokens(
            rows, starts, state.num_computed_tokens, state.token_ids, num_tokens, max_query_len, input_ids, positions,
            seq_lens,
        )  # fmt: skip
        width = cdiv(staged.max_seq_len, per_block)
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
            num_decode_rows=staged.num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len=staged.max_seq_len,
            query_start_loc=starts,
            seq_lens=seq_lens,
            positions=positions,
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
        )
        if staged.sampling is not None and staged.sampling_rows is not None:
            _bind(staged.sampling, words.view(staged.sampling_rows), words)
        return StepBatch(
            num_tokens=num_tokens,
            num_rows=num_rows,
            input_ids=input_ids,
            positions=positions,
            metadata=metadata,
            rows=rows,
            logits_index=None if staged.logits is None else words.view(staged.logits),
            sampling=staged.sampling,
            prompt_chunks=staged.prompt_chunks,
        )


def _subsets(sampling: SamplingRows) -> list[Subset]:
    """The subsets that there are."""
    some = (sampling.penalised, sampling.biased, sampling.banned, sampling.random, sampling.logprobs)
    return [subset for subset in some if subset is not None]


def _bind(sampling: SamplingRows, rows: Tensor, words: StepWords) -> None:
    """Give the subsets their tensors. rows: all sampling rows."""
    sampling.rows.row_index = rows
    for subset in _subsets(sampling):
        if subset.where is None:
            subset.row_index = rows
        else:
            subset.place_index, subset.row_index = words.view(subset.where[0]), words.view(subset.where[1])
