# SPDX-License-Identifier: Apache-2.0
"""A plan's changes reach the rows, all of them, and nothing of a row's earlier request stays."""

import pytest
import torch

from headrace.core.output import AdmittedRequest, BlockAppend, CachePlan, SchedulerOutput
from headrace.core.request import SamplingSpec
from headrace.worker.request_state import CHOICE, MIN_P, MIN_TOKENS, SEED, TEMPERATURE, TOP_K, TOP_P, RequestState
from headrace.worker.upload import StepWords, Uploader

CPU = torch.device("cpu")


def carry_out(
    state: RequestState,
    admitted: list[AdmittedRequest],
    appended: list[BlockAppend] | None = None,
    freed: list[int] | None = None,
) -> StepWords:
    words = StepWords()
    state.stage(SchedulerOutput(1, freed or [], admitted, appended or [], CachePlan(), []), words)
    Uploader(state.words).send(words)
    return words


def request(row: int, tokens: list[int], blocks: tuple[list[int], ...], **sampling: object) -> AdmittedRequest:
    return AdmittedRequest(row, tokens, len(tokens), 0, blocks, SamplingSpec(**sampling))


def test_every_setting_reaches_its_column() -> None:
    state = RequestState(3, 16, [4, 4], CPU)
    settings = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.25, "seed": 2**64 - 3, "choice": 2}
    carry_out(state, [request(2, [5, 6], ([1], [9]), min_tokens=4, eos_token_ids=[3], **settings)])
    record = state.records[2]
    floats = record.view(torch.float32)
    assert [int(record[i]) for i in (0, 1, 2, MIN_TOKENS, TOP_K, CHOICE)] == [0, 2, 2, 4, 7, 2]
    assert [float(floats[i]) for i in (TEMPERATURE, TOP_P, MIN_P)] == pytest.approx([0.5, 0.9, 0.25])
    assert int(state.records.view(torch.int64)[2, SEED // 2]) == -3
    assert state.token_ids[2, :3].tolist() == [5, 6, 0]
    assert [table[2, 0].item() for table in state.block_tables] == [1, 9]
    assert not state.records[:2].any()


def test_appended_blocks_follow_those_of_the_admission() -> None:
    state = RequestState(2, 16, [4, 4], CPU)
    carry_out(state, [request(1, [5], ([7, 8], [1, 2]))], [BlockAppend(1, 1, 2, [3, 4]), BlockAppend(1, 0, 2, [9])])
    assert state.block_tables[0][1].tolist() == [7, 8, 9, 0]
    assert state.block_tables[1][1].tolist() == [1, 2, 3, 4]


def test_a_row_keeps_nothing_of_its_earlier_request() -> None:
    state = RequestState(2, 16, [4], CPU)
    many = {"min_tokens": 1, "eos_token_ids": [1, 2, 3, 4], "logit_bias": {1: 1.0, 2: 2.0, 3: 3.0}}
    few = {"min_tokens": 1, "eos_token_ids": [9], "logit_bias": {8: 0.5}}
    carry_out(state, [request(0, [5], ([1],), **many)])
    carry_out(state, [request(0, [5], ([1],), **few)], freed=[0])
    assert state.banned_ids[0, :5].tolist() == [9, -1, -1, -1, -1]
    assert state.bias_ids[0, :4].tolist() == [8, -1, -1, -1]
    carry_out(state, [], freed=[0])
    assert state.settings[0] is None


def test_words_to_read_and_writes_far_away_travel_together() -> None:
    words = StepWords()
    words.write((1 << 33) + (1 << 31) + 5, [1, 2])
    where = words.read([3, 4, 5])
    packed = words.pack()
    low, high, source, length = packed[:4]
    assert (high << 32) | (low & 0xFFFFFFFF) == (1 << 33) + (1 << 31) + 5
    assert list(packed[source : source + length]) == [1, 2]
    words.arrived(torch.frombuffer(packed, dtype=torch.int32))
    assert words.view(where).tolist() == [3, 4, 5]


def test_untouched_rows_take_no_memory() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident_bytes()
    state = RequestState(256, 131_072, [4096], CPU)
    carry_out(state, [request(200, [1, 2, 3], ([1],))])
    assert state.words.nbytes > 128 << 20
    assert resident_bytes() - before < 32 << 20


def test_the_counts_follow_rows_that_are_freed_and_given_to_others() -> None:
    state = RequestState(3, 16, [4], CPU)

    def counts() -> tuple[int, int, int]:
        return state.num_not_plain, state.num_prompt_scored, state.num_failed

    carry_out(state, [request(0, [1], ([0],), temperature=0.0)])
    assert counts() == (0, 0, 0)
    many = dict.fromkeys(range(2000), 1.0)
    scored = request(1, [1], ([1],), temperature=0.0, prompt_logprobs=1)
    carry_out(state, [scored, request(2, [1], ([2],), temperature=0.9, logit_bias=many)])
    assert counts() == (1, 1, 1)
    # Freed and admitted again in one plan; then a row given anew without having been freed.
    carry_out(state, [request(2, [1], ([2],), temperature=0.0, logprobs=0)], freed=[2])
    assert counts() == (1, 1, 0)
    carry_out(state, [request(1, [1], ([1],), temperature=0.0)])
    assert counts() == (1, 0, 0)
    carry_out(state, [], freed=[0, 1, 2])
    carry_out(state, [], freed=[2])
    assert counts() == (0, 0, 0)
