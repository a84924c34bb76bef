# SPDX-License-Identifier: Apache-2.0
"""One step's tensors, gathered on the device from the rows into buffers that stay where they are."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.attention.base import AttentionMetadata, LongChunk
from headrace.attention.long_chunk import MIN_NEW_TOKENS, LongShapes
from headrace.core.output import ScheduledRow, SchedulerOutput
from headrace.core.padded_sizes import PaddedSize
from headrace.kernels.batch_prep import gather_blocks, gather_tokens
from headrace.utils.math import cdiv
from headrace.worker.request_state import (
    BANS,
    BIAS,
    FILTERS,
    LOGPROBS,
    PENALTIES,
    RANDOM,
    WHOLE_VOCABULARY,
    RequestState,
    RowSettings,
)
from headrace.worker.step_lists import StepLists
from headrace.worker.upload import StepWords

SizeOf = Callable[..., PaddedSize | None]
"""`PaddedSteps.size_of`."""


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

    def part(self, start: int, end: int) -> "Subset | None":
        """Those of the sampling rows `start` to `end`, with their places counted from there; None: none of them."""
        low, high = bisect.bisect_left(self.places, start), bisect.bisect_left(self.places, end)
        if low == high:
            return None
        assert self.row_index is not None, "the step's words are sent before its rows are sampled"
        index = self.place_index
        return Subset(
            [place - start for place in self.places[low:high]],
            self.rows[low:high],
            place_index=None if index is None else index[low:high] - start,
            row_index=self.row_index[low:high],
        )


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

    def part(self, start: int, end: int) -> "SamplingRows":
        """The sampling rows `start` to `end` by themselves."""

        def of(subset: Subset | None) -> Subset | None:
            return None if subset is None else subset.part(start, end)

        rows = of(self.rows)
        assert rows is not None, "a part has rows"
        return replace(
            self,
            places=self.places[start:end],
            rows=rows,
            penalised=of(self.penalised),
            biased=of(self.biased),
            banned=of(self.banned),
            random=of(self.random),
            logprobs=of(self.logprobs),
        )

    @property
    def is_plain(self) -> bool:
        """Argmax and nothing else."""
        return not _subsets(self)


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
    size: PaddedSize | None = None
    """The shape that the body runs in: its lists are in the state; None: they are in the step's words."""
    rows: slice | None = None
    starts: slice | None = None
    logits: slice | None = None
    """None where every token's hidden state is one the head needs."""
    sampling_rows: slice | None = None
    """None where no row samples, or where the list is in the state."""
    sampling: SamplingRows | None = None
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    long_chunks: tuple[LongChunk, ...] = ()


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
    logits_index: Tensor | None = None
    """Which hidden states the head needs; None: all, in order."""
    sampling: SamplingRows | None = None
    prompt_chunks: list[PromptChunk] = field(default_factory=list)


def plain_rows(places: list[int], rows: list[int]) -> SamplingRows:
    """Sampling rows that all need an argmax and nothing else."""
    everything = Subset(list(range(len(places))), rows, True)
    return SamplingRows(places, everything, None, None, None, None, None, 0, 0, False, 0, 0, 0)


def sampling_rows(
    places: list[int], rows: list[int], max_len: int, settings: Sequence[RowSettings | None], vocab_size: int
) -> SamplingRows:
    """Sort a step's sampling rows by the work they need.

    Args:
        places: of each in the plan.
        rows: theirs in the state.
        max_len: at least the known tokens of any of them.
    """
    needs = [_known(settings, row).needs for row in rows]
    # Most steps have few different kinds of rows, so whole kinds are asked, not rows.
    kinds = set(needs)

    def subset(need: int) -> Subset | None:
        wanted = [kind for kind in kinds if kind & need]
        if len(wanted) == len(kinds):
            return Subset(everything.places, rows, True)
        some = [place for place, kind in enumerate(needs) if kind & need] if wanted else []
        return Subset(some, [rows[place] for place in some]) if some else None

    def has_of(subset: Subset | None) -> list[RowSettings]:
        return [] if subset is None else [_known(settings, row) for row in subset.rows]

    everything = Subset(list(range(len(places))), rows, True)
    filtered = has_of(subset(FILTERS))
    if any(kind & WHOLE_VOCABULARY for kind in kinds):
        num_candidates = vocab_size
    else:
        num_candidates = min(max((has.top_k for has in filtered), default=0), vocab_size)
    banned, biased, logprobs = subset(BANS), subset(BIAS), subset(LOGPROBS)
    return SamplingRows(
        places=places,
        rows=everything,
        penalised=subset(PENALTIES),
        biased=biased,
        banned=banned,
        random=subset(RANDOM),
        logprobs=logprobs,
        max_len=max_len,
        num_candidates=num_candidates,
        has_filters=bool(filtered),
        ban_width=max((has.num_banned for has in has_of(banned)), default=0),
        bias_width=max((has.num_bias for has in has_of(biased)), default=0),
        num_top=max((has.logprobs or 0 for has in has_of(logprobs)), default=0),
    )


def _known(settings: Sequence[RowSettings | None], row: int) -> RowSettings:
    has = settings[row]
    assert has is not None, f"row {row} is scheduled but was never admitted"
    return has


def prompt_chunks(
    scheduled: Sequence[ScheduledRow], num_decodes: int, settings: Sequence[RowSettings | None]
) -> list[PromptChunk]:
    """Those of the plan's chunks, which come after its decodes, whose prompt log-probabilities are wanted."""
    chunks = []
    first = num_decodes
    for place, row in enumerate(scheduled, num_decodes):
        has = _known(settings, row.row)
        if has.prompt_logprobs is not None:
            count = min(row.num_tokens, has.num_prompt_tokens - 1 - row.start)
            if count > 0:
                chunks.append(PromptChunk(place, row.row, row.start, first, count, has.prompt_logprobs))
        first += row.num_tokens
    return chunks


class InputBatch:
    """Buffers for the largest step, filled anew for each one: `stage` on the host, then `gather` on the device."""

    def __init__(
        self,
        state: RequestState,
        max_num_tokens: int,
        tokens_per_block: int,
        vocab_size: int,
        long_shapes: LongShapes | None = None,
    ) -> None:
        """long_shapes: which chunks attend by themselves; None: none do."""
        device = state.words.device
        num_rows = state.records.shape[0]
        self._state = state
        self.lists = StepLists(state)
        self._long_shapes = long_shapes
        self._tokens_per_block = tokens_per_block
        self._vocab_size = vocab_size
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._slots = [torch.zeros_like(self._input_ids) for _ in state.block_tables]
        self._tables = [torch.zeros_like(table) for table in state.block_tables]
        self._counting = list(range(num_rows + 1))
        self._gather_tokens = gather_tokens.choose(device.type)
        self._gather_blocks = gather_blocks.choose(device.type)

    def stage(self, plan: SchedulerOutput, words: StepWords, size_of: SizeOf | None = None) -> StagedStep:
        """Stage the lists of a step: rows, query starts, rows of the logits, and each subset of the sampling rows.

        size_of: which shape a step is padded to, if any are.
        """
        state, chunks = self._state, plan.chunks
        num_tokens = num_decode_rows = num_decodes = len(plan.decode_rows)
        rows, starts = plan.decode_rows, self._counting[: num_decodes + 1]
        places, last_tokens = self._counting[:num_decodes], self._counting[:num_decodes]
        max_query_len = min(num_decodes, 1)
        max_seq_len = max_sampled_len = max(plan.decode_starts, default=-1) + 1
        if chunks:
            rows = rows + [chunk.row for chunk in chunks]
        for place, chunk in enumerate(chunks, num_decodes):
            count = chunk.num_tokens
            num_tokens += count
            starts.append(num_tokens)
            if chunk.samples:
                places.append(place)
                last_tokens.append(num_tokens - 1)
                max_sampled_len = max(max_sampled_len, chunk.start + count)
            if count == 1:
                num_decode_rows += 1
            max_query_len = max(max_query_len, count)
            max_seq_len = max(max_seq_len, chunk.start + count)
        staged = StagedStep(num_tokens, len(rows), num_decode_rows, max_query_len, max_seq_len)
        if state.num_prompt_scored and chunks:
            staged.prompt_chunks = prompt_chunks(chunks, num_decodes, state.settings)
        # The head of a padded step gets the sampling rows' hidden states only; prompt scores want more.
        if size_of is not None and rows and not staged.prompt_chunks:
            staged.size = size_of(num_tokens, len(rows), is_decode=max_query_len == 1)
        if staged.size is None:
            staged.rows, staged.starts = words.read(rows), words.read(starts)
            if places and len(places) < num_tokens:
                staged.logits = words.read(last_tokens)
            if self._long_shapes is not None and max_query_len >= MIN_NEW_TOKENS:
                staged.long_chunks = _long_chunks(chunks, num_decodes, starts, self._long_shapes)
        sample_rows = rows if len(places) == len(rows) else [rows[place] for place in places]
        if places:
            self._stage_sampling(staged, sample_rows, places, max_sampled_len, words)
        if size_of is not None:
            if staged.size is not None:
                self.lists.stage("rows", rows, -1, words)
                self.lists.stage("query_start_loc", starts, num_tokens, words)
                self.lists.stage("sampled", last_tokens, 0, words)
            self.lists.stage("sample_rows", sample_rows, -1, words)
        return staged

    def _stage_sampling(
        self, staged: StagedStep, sample_rows: list[int], places: list[int], max_len: int, words: StepWords
    ) -> None:
        """The sampling rows and their subsets. A list that is the step's rows, or all sampling rows, is sent once."""
        state = self._state
        if state.num_not_plain:
            sampling = sampling_rows(places, sample_rows, max_len, state.settings, self._vocab_size)
        else:
            sampling = plain_rows(places, sample_rows)
        staged.sampling = sampling
        if staged.size is None:
            is_every_row = len(places) == staged.num_rows
            staged.sampling_rows = staged.rows if is_every_row else words.read(sampling.rows.rows)
        for subset in _subsets(sampling):
            if not subset.is_all:
                subset.where = words.read(subset.places), words.read(subset.rows)

    def gather(self, words: StepWords, staged: StagedStep) -> StepBatch:
        """Fill the buffers for a step whose words have been sent."""
        assert staged.rows is not None and staged.starts is not None, "a padded step's lists lie in the state"
        starts = self._query_start_loc[: staged.num_rows + 1]
        starts.copy_(words.view(staged.starts))
        step = self._fill(
            words.view(staged.rows), starts, staged.num_tokens, staged.num_decode_rows, staged.num_decode_rows,
            staged.max_query_len, staged.max_seq_len,
        )  # fmt: skip
        step.logits_index = None if staged.logits is None else words.view(staged.logits)
        step.prompt_chunks = staged.prompt_chunks
        step.metadata.long_chunks = staged.long_chunks
        if staged.sampling is not None:
            step.sampling = self.bind(words, staged)
        return step

    def gather_padded(self, size: PaddedSize) -> StepBatch:
        """Fill the buffers for a padded step whose lists lie in the state. Nothing here depends on the step itself."""
        num_rows = size.num_rows
        return self._fill(
            self.lists.view("rows", num_rows),
            self.lists.view("query_start_loc", num_rows + 1),
            size.num_tokens,
            num_rows,
            num_rows if size.is_decode else 0,
            1 if size.is_decode else size.num_tokens,
            self._state.token_ids.shape[1],
        )

    def bind(self, words: StepWords, staged: StagedStep) -> SamplingRows:
        """The step's sampling rows with their tensors, once its words have been sent."""
        sampling = staged.sampling
        assert sampling is not None, "the step samples"
        if staged.sampling_rows is None:
            rows = self.lists.view("sample_rows", len(sampling.places))
        else:
            rows = words.view(staged.sampling_rows)
        sampling.rows.row_index = rows
        for subset in _subsets(sampling):
            if subset.where is None:
                subset.row_index = rows
            else:
                subset.place_index, subset.row_index = words.view(subset.where[0]), words.view(subset.where[1])
        return sampling

    def _fill(
        self,
        rows: Tensor,
        starts: Tensor,
        num_tokens: int,
        num_decode_rows: int,
        first_prefill_row: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> StepBatch:
        """Gather tokens, slots and block tables, on the device; the numbers are ceilings."""
        num_rows = rows.shape[0]
        state, per_block = self._state, self._tokens_per_block
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        seq_lens = self._seq_lens[:num_rows]
        self._gather_tokens(
            rows, starts, state.num_computed_tokens, state.token_ids, max_query_len, input_ids, positions, seq_lens
        )
        width = cdiv(max_seq_len, per_block)
        tables, slots = [], []
        for group, table in enumerate(state.block_tables):
            tables.append(self._tables[group][:num_rows, : min(width, table.shape[1])])
            slots.append(self._slots[group][:num_tokens])
            self._gather_blocks(
                rows, starts, positions, seq_lens, table, per_block, max_query_len, slots[-1], tables[-1]
            )
        metadata = AttentionMetadata(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_decode_rows,
            first_prefill_row=first_prefill_row,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc=starts,
            seq_lens=seq_lens,
            positions=positions,
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
        )
        return StepBatch(num_tokens, num_rows, input_ids, positions, metadata, rows)


def _subsets(sampling: SamplingRows) -> list[Subset]:
    """The subsets that there are."""
    some = (sampling.penalised, sampling.biased, sampling.banned, sampling.random, sampling.logprobs)
    return [subset for subset in some if subset is not None]


def _long_chunks(
    chunks: Sequence[ScheduledRow], num_decodes: int, starts: list[int], shapes: LongShapes
) -> tuple[LongChunk, ...]:
    """The chunks that attend by themselves, of those after the plan's decodes. starts: each row's first token."""
    return tuple(
        LongChunk(place, starts[place], row.num_tokens, row.start + row.num_tokens)
        for place, row in enumerate(chunks, num_decodes)
        if row.num_tokens >= MIN_NEW_TOKENS and shapes.takes(row.num_tokens, row.start + row.num_tokens)
    )
