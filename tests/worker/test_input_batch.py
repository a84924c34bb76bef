# SPDX-License-Identifier: Apache-2.0
"""A plan's rows become the tensors that models and attention are promised."""

import torch

from headrace.core.output import AdmittedRequest, CachePlan, ScheduledRow, SchedulerOutput
from headrace.core.padded_sizes import PaddedSize
from headrace.core.request import SamplingSpec
from headrace.worker.input_batch import InputBatch, StepBatch, prompt_chunks, sampling_rows
from headrace.worker.request_state import RequestState
from headrace.worker.upload import StepWords, Uploader

CPU = torch.device("cpu")
GREEDY = SamplingSpec(temperature=0.0)


def admitted(row: int, num_tokens: int, computed: int, spec: SamplingSpec = GREEDY, prompt: int = 0) -> AdmittedRequest:
    """Tokens 100 * row + position, in blocks 10 * row + index."""
    tokens = [100 * row + i for i in range(num_tokens)]
    blocks = [10 * row + i for i in range(8)]
    return AdmittedRequest(row, tokens, prompt or num_tokens, computed, (blocks,), spec)


def gathered(requests: list[AdmittedRequest], scheduled: list[ScheduledRow]) -> tuple[StepBatch, RequestState]:
    state = RequestState(6, 32, [8], CPU)
    batch = InputBatch(state, 64, 4, 1000)
    plan = SchedulerOutput(1, [], requests, [], CachePlan(), scheduled)
    words = StepWords()
    state.stage(plan, words)
    staged = batch.stage(plan, words)
    Uploader(state.words).send(words)
    return batch.gather(words, staged), state


def test_a_mixed_step_has_every_rows_next_tokens_in_order() -> None:
    requests = [admitted(5, 9, 8), admitted(2, 20, 0), admitted(3, 14, 4)]
    scheduled = [ScheduledRow(5, 1, True, 8), ScheduledRow(2, 6, False, 0), ScheduledRow(3, 10, True, 4)]
    step, _ = gathered(requests, scheduled)
    meta = step.metadata
    assert step.input_ids.tolist() == [508, *range(200, 206), *range(304, 314)]
    assert step.positions.tolist() == [8, *range(6), *range(4, 14)]
    assert step.input_ids.dtype == step.positions.dtype == meta.slot_mapping[0].dtype == torch.int64
    assert meta.query_start_loc.tolist() == [0, 1, 7, 17]
    assert meta.seq_lens.tolist() == [9, 6, 14]
    assert meta.query_start_loc.dtype == meta.seq_lens.dtype == meta.block_tables[0].dtype == torch.int32
    assert (meta.num_tokens, meta.num_rows, meta.num_decode_rows) == (17, 3, 1)
    assert (meta.max_query_len, meta.max_seq_len) == (10, 14)
    where = [(5, 8), *((2, i) for i in range(6)), *((3, i) for i in range(4, 14))]
    assert meta.slot_mapping[0].tolist() == [(10 * row + at // 4) * 4 + at % 4 for row, at in where]
    assert meta.block_tables[0].tolist() == [[10 * row + i for i in range(4)] for row in (5, 2, 3)]
    assert step.logits_index is not None
    assert step.logits_index.tolist() == [0, 16]
    assert step.sampling is not None
    assert step.sampling.places == [0, 2]


def test_decodes_given_as_columns_are_staged_as_if_each_were_a_row_of_one_token() -> None:
    scored = SamplingSpec(temperature=0.0, prompt_logprobs=1)
    penalised = SamplingSpec(temperature=0.7, top_k=5, repetition_penalty=1.1)
    requests = [
        *(admitted(row, 7 + row, 6 + row, spec) for row, spec in ((4, GREEDY), (0, penalised))),
        *(admitted(2, 20, 0, scored), admitted(1, 1, 0, penalised), admitted(3, 14, 4)),
    ]
    decodes = [ScheduledRow(4, 1, True, 10), ScheduledRow(0, 1, True, 6)]
    chunks = [ScheduledRow(1, 1, True, 0), ScheduledRow(2, 16, False, 0), ScheduledRow(3, 10, True, 4)]
    steps = []
    for plan in (
        SchedulerOutput(1, [], requests, [], CachePlan(), decodes + chunks),
        SchedulerOutput(1, [], requests, [], CachePlan(), chunks, [4, 0], [10, 6]),
    ):
        assert plan.scheduled == decodes + chunks
        assert (plan.num_rows, plan.num_tokens) == (5, 29)
        state = RequestState(6, 32, [8], CPU)
        batch = InputBatch(state, 64, 4, 1000)
        words = StepWords()
        state.stage(plan, words)
        staged = batch.stage(plan, words)
        assert staged.sampling is not None
        steps.append((words.pack().tolist(), staged))
    assert steps[0] == steps[1]
    staged = steps[0][1]
    assert (staged.num_tokens, staged.num_rows, staged.num_decode_rows) == (29, 5, 3)
    assert (staged.max_query_len, staged.max_seq_len) == (16, 16)
    sampling = staged.sampling
    assert (sampling.places, sampling.rows.rows, sampling.max_len) == ([0, 1, 2, 4], [4, 0, 1, 3], 14)
    for subset in (sampling.penalised, sampling.random):
        assert subset is not None
        assert (subset.places, subset.rows, subset.is_all) == ([1, 2], [0, 1], False)
    assert (sampling.num_candidates, sampling.has_filters, sampling.logprobs) == (5, True, None)
    assert [(chunk.place, chunk.first, chunk.count) for chunk in staged.prompt_chunks] == [(3, 3, 16)]


def test_a_decode_step_needs_no_index_for_its_logits() -> None:
    requests = [admitted(row, 7 + row, 6 + row) for row in (4, 0)]
    step, _ = gathered(requests, [ScheduledRow(4, 1, True, 10), ScheduledRow(0, 1, True, 6)])
    assert step.logits_index is None
    assert step.input_ids.tolist() == [410, 6]
    assert step.metadata.slot_mapping[0].tolist() == [42 * 4 + 2, 1 * 4 + 2]


def test_padding_writes_no_kv_and_has_no_length() -> None:
    state = RequestState(6, 32, [8], CPU)
    batch = InputBatch(state, 64, 4, 1000)
    size = PaddedSize(8, 4, False)
    # A longer step first, so that something of it could show.
    for step_id, (requests, scheduled) in enumerate(
        (
            ([admitted(1, 7, 0), admitted(4, 3, 2)], [ScheduledRow(4, 1, True, 2), ScheduledRow(1, 7, True, 0)]),
            ([admitted(2, 5, 0)], [ScheduledRow(2, 5, True, 0)]),
        )
    ):
        words = StepWords()
        plan = SchedulerOutput(step_id, [1, 4], requests, [], CachePlan(), scheduled)
        state.stage(plan, words)
        staged = batch.stage(plan, words, lambda *_, **__: size)
        Uploader(state.words).send(words)
        step = batch.gather_padded(size)
    assert staged.size == size
    meta = step.metadata
    assert step.input_ids.tolist() == [*range(200, 205), 0, 0, 0]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert meta.slot_mapping[0].tolist() == [80, 81, 82, 83, 84, -1, -1, -1]
    assert meta.query_start_loc.tolist() == [0, 5, 5, 5, 5]
    assert meta.seq_lens.tolist() == [5, 0, 0, 0]
    assert step.rows.tolist() == [2, -1, -1, -1]
    assert batch.lists.view("sampled", 3).tolist() == [4, 0, 0]
    assert batch.lists.view("sample_rows", 3).tolist() == [2, -1, -1]
    assert (meta.num_decode_rows, meta.first_prefill_row) == (4, 0)


def test_a_steps_lists_are_sent_only_where_they_differ_from_the_last_ones() -> None:
    state = RequestState(6, 32, [8], CPU)
    batch = InputBatch(state, 64, 4, 1000)
    scheduled = [ScheduledRow(4, 1, True, 2), ScheduledRow(1, 1, True, 6)]
    plan = SchedulerOutput(1, [], [admitted(1, 7, 6), admitted(4, 3, 2)], [], CachePlan(), scheduled)
    counts = []
    for again in range(4):
        words = StepWords()
        if again == 0:
            state.stage(plan, words)
        before = words.num_writes
        batch.stage(plan, words, lambda *_, **__: PaddedSize(2, 2, True))
        counts.append(words.num_writes - before)
        if again == 2:
            batch.lists.forget()
    assert counts == [4, 0, 0, 4]


def test_prompt_scores_cover_each_prompt_token_but_the_first_once() -> None:
    spec = SamplingSpec(temperature=0.0, prompt_logprobs=2)
    _, state = gathered([admitted(1, 12, 0, spec, prompt=10)], [ScheduledRow(1, 1, False, 0)])
    covered = []
    # Chunks of a first run, then a step that recomputes past the prompt's end after preemption.
    for start, count in ((0, 4), (4, 1), (5, 5), (10, 2)):
        chunks = prompt_chunks([ScheduledRow(1, count, False, start)], 0, state.settings)
        covered += [chunk.start + 1 + i for chunk in chunks for i in range(chunk.count)]
    assert covered == list(range(1, 10))


def test_the_filters_look_at_no_more_tokens_than_some_row_needs() -> None:
    def candidates(*specs: SamplingSpec) -> int:
        _, state = gathered(
            [admitted(row, 3, 2, spec) for row, spec in enumerate(specs)],
            [ScheduledRow(row, 1, True, 2) for row in range(len(specs))],
        )
        rows = list(range(len(specs)))
        return sampling_rows(rows, rows, 3, state.settings, 1000).num_candidates

    top_p, top_k = SamplingSpec(top_p=0.9), SamplingSpec(top_k=40, top_p=0.9)
    assert candidates(GREEDY, SamplingSpec()) == 0
    assert candidates(top_k, SamplingSpec(top_k=7), GREEDY) == 40
    assert candidates(top_k, top_p) == 1000
    assert candidates(SamplingSpec(top_p=0.9, temperature=0.0), top_k) == 40
    assert candidates(SamplingSpec(top_k=5000)) == 1000


def test_plain_rows_are_sorted_alike_whether_or_not_another_row_is_not_plain() -> None:
    plain = [admitted(row, 9, 5) for row in (3, 1)]
    scheduled = [ScheduledRow(3, 1, False, 5), ScheduledRow(1, 4, True, 5)]
    alone, _ = gathered(plain, scheduled)
    beside, state = gathered([*plain, admitted(0, 3, 2, SamplingSpec(temperature=0.9))], scheduled)
    assert state.num_not_plain == 1
    for step in (alone, beside):
        sampling = step.sampling
        assert sampling is not None and sampling.rows.row_index is not None
        assert (sampling.places, sampling.rows.places, sampling.rows.rows) == ([1], [0], [1])
        assert sampling.rows.row_index.tolist() == [1]
        assert sampling.random is sampling.penalised is sampling.logprobs is None
        assert step.logits_index is not None and step.logits_index.tolist() == [4]
