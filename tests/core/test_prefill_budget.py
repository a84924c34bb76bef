# SPDX-License-Identifier: Apache-2.0
"""Steps take along as much prefill as their decodes and the waiting prompts ask for, counted by what it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.limits import SchedulerLimits
from headrace.core.output import ModelOutput, SchedulerOutput
from headrace.core.prefill_budget import LEAST, adaptive_budget, cost, tokens_within
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler


@given(st.integers(1, 5000), st.integers(0, 200_000), st.integers(0, 100_000))
def test_a_chunk_costs_no_more_than_its_budget_and_one_token_more_would(budget: int, start: int, depth: int) -> None:
    num_tokens = tokens_within(budget, start, depth)
    assert num_tokens >= 1
    if num_tokens > 1:
        assert cost(num_tokens, start, depth) <= budget + 1
    assert cost(num_tokens + 2, start, depth) > budget


def test_without_a_depth_tokens_are_what_they_are() -> None:
    assert tokens_within(700, 10**6, 0) == cost(700, 10**6, 0) == 700


@pytest.mark.parametrize(
    ("num_decodes", "backlog", "expected"), [(1, 0, 960), (100, 0, 1600), (900, 0, 2048), (1, 64_000, 1000)]
)
def test_the_budget_grows_with_decodes_and_with_what_waits(num_decodes: int, backlog: int, expected: int) -> None:
    assert adaptive_budget(num_decodes, backlog, 2048) == expected


class Run:
    """A scheduler whose worker always answers at once."""

    def __init__(self, **limits: object) -> None:
        cache = KVCacheManager(CacheLayout.plain(9000), 32)
        defaults = {"max_batch_size": 64, "max_num_tokens": 8192, "max_prefill_tokens": 2048, "max_seq_len": 40_000}
        self.scheduler = Scheduler(SchedulerLimits(**{**defaults, "adapts_prefill": True, **limits}), cache)  # type: ignore[arg-type]
        self.num_added = 0

    def add(self, count: int, num_tokens: int) -> None:
        for _ in range(count):
            self.num_added += 1
            prompt = [self.num_added * 50_000 + i for i in range(num_tokens)]
            spec = SamplingSpec(temperature=0.0, max_tokens=2000)
            self.scheduler.add_request(Request(f"r{self.num_added}", prompt, spec))

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.update(plan, ModelOutput(plan.step_id, [1] * sum(row.samples for row in plan.scheduled)))
        return plan


def chunk_tokens(plan: SchedulerOutput) -> int:
    return sum(row.num_tokens for row in plan.scheduled if row.num_tokens > 1)


def test_one_prompt_alone_gets_the_whole_step_and_several_are_staggered() -> None:
    alone = Run()
    alone.add(1, 10_000)
    assert alone.step().num_tokens == 8192
    several = Run()
    several.add(3, 10_000)
    assert several.step().num_tokens == 2048


def test_a_late_prompt_rides_along_in_small_chunks_and_smaller_ones_the_deeper_it_is() -> None:
    run = Run(attention_depth=15_000)
    run.add(32, 16)
    run.step()
    run.add(1, 30_000)
    sizes = []
    while True:
        plan = run.step()
        if not chunk_tokens(plan):
            break
        assert sum(row.num_tokens == 1 for row in plan.scheduled) == 32
        sizes.append(chunk_tokens(plan))
    assert LEAST * 0.9 < sizes[0] <= LEAST and max(sizes) == sizes[0]
    assert sizes[-2] < sizes[0] / 2
    assert sum(sizes) == 30_000


def test_an_explicit_budget_is_taken_as_it_is() -> None:
    run = Run(adapts_prefill=False, max_prefill_tokens=100, attention_depth=10)
    run.add(2, 16)
    run.step()
    run.add(1, 5000)
    assert {chunk_tokens(run.step()) for _ in range(20)} == {100}
