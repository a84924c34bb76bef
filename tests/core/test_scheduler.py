# SPDX-License-Identifier: Apache-2.0
"""What the scheduler promises, one promise a test."""

import pytest
from simulated_worker import EOS, Engine, Result, output_of, plain_run

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout, GroupLayout
from headrace.core.output import ModelOutput
from headrace.core.request import Request, RequestStatus, SamplingSpec
from headrace.core.scheduler import Scheduler, SchedulerLimits
from headrace.errors import ConfigError, ContextLengthError, EngineError, RequestError


def make_engine(
    *,
    num_blocks: int = 64,
    tokens_per_block: int = 4,
    max_batch_size: int = 8,
    max_num_tokens: int = 32,
    max_prefill_tokens: int = 16,
    max_seq_len: int = 64,
    watermark: float = 0.0,
    policy: str = "fcfs",
    capacity_policy: str = "MAX_UTILIZATION",
    enable_chunked_prefill: bool = True,
    enable_block_reuse: bool = True,
    depth: int = 2,
) -> Engine:
    limits = SchedulerLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_prefill_tokens=max_prefill_tokens,
        max_seq_len=max_seq_len,
        watermark=watermark,
        policy=policy,
        capacity_policy=capacity_policy,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    cache = KVCacheManager(CacheLayout.plain(num_blocks), tokens_per_block, enable_block_reuse=enable_block_reuse)
    return Engine(Scheduler(limits, cache), depth)


def make_request(
    request_id: str,
    num_prompt_tokens: int = 6,
    max_tokens: int = 8,
    *,
    first_token: int = 0,
    priority: int = 50,
    cache_salt: str | None = None,
    seed: int = 0,
    **sampling: object,
) -> Request:
    prompt = [(first_token * 31 + i * 7) % 97 for i in range(num_prompt_tokens)]
    spec = SamplingSpec(max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(request_id, prompt, spec, priority=priority, cache_salt=cache_salt)


def rows_of(engine: Engine, step: int) -> list[tuple[int, int]]:
    return [(each.row, each.num_tokens) for each in engine.plans[step].scheduled]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_step_is_launched_before_the_results_of_those_ahead_are_known(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.add(make_request("a", max_tokens=10))
    for _ in range(depth):
        assert engine.launch() is not None
    assert engine.scheduler.num_plans_in_flight == depth
    starts = [plan.scheduled[0].start for plan in engine.plans]
    assert starts == [0, *range(6, 6 + depth - 1)]
    engine.run()
    engine.check_outputs()


def test_a_request_whose_output_is_covered_by_launched_plans_is_not_scheduled_again() -> None:
    engine = make_engine(depth=4)
    engine.add(make_request("a", max_tokens=2))
    assert engine.launch() is not None
    assert engine.launch() is not None
    assert engine.launch() is None
    engine.run()
    assert len(engine.plans) == 2


def test_decodes_go_first_and_prefills_share_what_the_mixed_budget_leaves() -> None:
    engine = make_engine(max_num_tokens=32, max_prefill_tokens=10, depth=1)
    engine.add(make_request("a", max_tokens=20))
    engine.step()
    engine.add(make_request("b", num_prompt_tokens=25, first_token=1))
    engine.add(make_request("c", num_prompt_tokens=4, first_token=2))
    for _ in range(3):
        engine.step()
    assert rows_of(engine, 1) == [(0, 1), (1, 10)]
    assert rows_of(engine, 2) == [(0, 1), (1, 10)]
    assert rows_of(engine, 3) == [(0, 1), (1, 5), (2, 4)]
    engine.run()
    engine.check_outputs()


def test_a_prompt_longer_than_a_step_runs_in_chunks_and_alone_may_use_the_whole_step() -> None:
    engine = make_engine(max_num_tokens=16, max_prefill_tokens=4, max_batch_size=4)
    engine.add(make_request("a", num_prompt_tokens=50))
    engine.run()
    assert [rows_of(engine, i)[0][1] for i in range(4)] == [16, 16, 16, 2]
    engine.check_outputs()


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it() -> None:
    engine = make_engine(max_num_tokens=16, max_prefill_tokens=4, max_batch_size=4, enable_chunked_prefill=False)
    engine.add(make_request("a", num_prompt_tokens=10, max_tokens=3))
    engine.add(make_request("b", num_prompt_tokens=9, max_tokens=3, first_token=1))
    engine.add(make_request("long", num_prompt_tokens=40, max_tokens=3, first_token=2))
    engine.run()
    chunks = [n for plan in engine.plans for n in (row.num_tokens for row in plan.scheduled) if n > 1]
    assert chunks[:2] == [10, 9]
    assert sum(chunks[2:]) == 40
    engine.check_outputs()


def test_a_prompt_seen_before_is_taken_from_the_cache_but_for_its_last_token() -> None:
    engine = make_engine()
    first = engine.add(make_request("a", num_prompt_tokens=16))
    engine.run()
    second = engine.add(make_request("b", num_prompt_tokens=16))
    engine.run()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 15
    assert engine.last_delta["b"].num_cached_tokens == 15
    assert engine.outputs["a"] == engine.outputs["b"]
    engine.check_outputs()


def test_blocks_can_be_found_once_their_step_has_come_back_and_not_before() -> None:
    engine = make_engine(depth=1)
    engine.add(make_request("a", num_prompt_tokens=16))
    engine.launch()
    prompt = engine.requests["a"].token_ids
    assert engine.scheduler.cache.tree.match(prompt, (None,), 99).depth == 0
    engine.collect()
    assert engine.scheduler.cache.tree.match(prompt, (None,), 99).depth == 4
    engine.run()


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    engine = make_engine()
    engine.add(make_request("a", num_prompt_tokens=8, max_tokens=13))
    engine.run()
    turn = [*engine.requests["a"].token_ids, 1, 2, 3]
    engine.add(Request("b", turn, SamplingSpec(max_tokens=2)))
    engine.run()
    assert engine.requests["b"].num_cached_tokens == 20
    engine.check_outputs()


def test_two_salts_never_share_a_block() -> None:
    engine = make_engine()
    for salt in range(3):
        engine.add(make_request(f"r{salt}", num_prompt_tokens=16, cache_salt=f"salt{salt}", seed=salt))
        engine.run()
    assert all(request.num_cached_tokens == 0 for request in engine.requests.values())
    engine.check_outputs()


def test_without_block_reuse_nothing_is_cached() -> None:
    engine = make_engine(enable_block_reuse=False)
    for request_id in "ab":
        engine.add(make_request(request_id, num_prompt_tokens=16))
        engine.run()
    assert engine.requests["b"].num_cached_tokens == 0
    assert engine.scheduler.stats().num_free_blocks == 64


def test_equal_prompts_that_run_side_by_side_give_the_same_and_leave_one_copy() -> None:
    engine = make_engine()
    for i in range(4):
        engine.add(make_request(f"r{i}", num_prompt_tokens=8, max_tokens=9))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats().num_cached_blocks == 4
    engine.check_nothing_leaked()


def test_prompt_logprobs_come_once_for_each_position_and_skip_the_cache() -> None:
    engine = make_engine(max_num_tokens=8, max_prefill_tokens=8)
    engine.add(make_request("warm", num_prompt_tokens=20))
    engine.run()
    request = engine.add(make_request("a", num_prompt_tokens=20, prompt_logprobs=0))
    engine.run()
    assert request.num_cached_tokens == 0
    assert engine.prompt_logprobs["a"] == request.token_ids[1:20]


def test_prompt_logprobs_are_not_repeated_after_a_preemption() -> None:
    engine = make_engine(num_blocks=16, max_seq_len=64, depth=2)
    engine.add(make_request("a", num_prompt_tokens=20, max_tokens=30))
    engine.add(make_request("b", num_prompt_tokens=20, max_tokens=30, first_token=1, prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 0
    engine.check_outputs()


def test_a_stop_token_ends_the_request_with_its_id_and_an_end_token_without() -> None:
    expected = plain_run(make_request("x", max_tokens=30).token_ids, SamplingSpec(max_tokens=30), 64)[0]
    engine = make_engine()
    engine.add(make_request("stop", max_tokens=30, stop_token_ids=[expected[4]]))
    engine.add(make_request("eos", max_tokens=30, eos_token_ids=[expected[6]]))
    engine.run()
    assert engine.outputs["stop"] == expected[:5]
    assert (engine.last_delta["stop"].finish_reason, engine.last_delta["stop"].stop_reason) == ("stop", expected[4])
    assert engine.outputs["eos"] == expected[:7]
    assert (engine.last_delta["eos"].finish_reason, engine.last_delta["eos"].stop_reason) == ("stop", None)


def test_a_stop_token_within_min_tokens_does_not_end_the_request() -> None:
    expected = plain_run(make_request("x", max_tokens=9).token_ids, SamplingSpec(max_tokens=9), 64)[0]
    engine = make_engine()
    engine.add(make_request("a", max_tokens=9, min_tokens=5, stop_token_ids=[expected[4]]))
    engine.run()
    assert engine.outputs["a"] == expected
    assert engine.last_delta["a"].finish_reason == "length"


def test_several_tokens_of_one_step_are_cut_at_the_stop() -> None:
    engine = make_engine()
    engine.add(make_request("a", max_tokens=20, stop_token_ids=[EOS], logprobs=0))
    plan = engine.scheduler.schedule()
    assert plan is not None
    (delta,) = engine.scheduler.update(plan, output_of(plan, [Result([1, EOS, 2])]))
    assert (delta.new_token_ids, delta.finish_reason, delta.stop_reason) == ([1, EOS], "stop", EOS)


def test_max_seq_len_ends_a_request_that_asks_for_more() -> None:
    engine = make_engine(max_seq_len=20)
    engine.add(make_request("a", num_prompt_tokens=15, max_tokens=1000))
    engine.run()
    assert len(engine.outputs["a"]) == 5
    assert engine.last_delta["a"].finish_reason == "length"


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_at_any_moment_frees_everything_and_silences(when: str) -> None:
    engine = make_engine(num_blocks=16, max_num_tokens=16, max_prefill_tokens=8, depth=4, max_batch_size=2)
    engine.add(make_request("a", num_prompt_tokens=16, max_tokens=40))
    request = engine.add(make_request("b", num_prompt_tokens=30, max_tokens=30, first_token=1))
    reached = {
        "waiting": lambda: True,
        "prefill": lambda: 0 < request.num_launched_tokens < 30,
        "decode": lambda: request.num_known_tokens > 32,
        "preempted": lambda: request.status is RequestStatus.PREEMPTED,
    }[when]
    while not reached():
        engine.step()
    assert when == "waiting" or engine.scheduler.num_plans_in_flight > 0
    engine.abort("b")
    engine.scheduler.check_invariants()
    assert request.status is RequestStatus.FINISHED_ABORTED
    engine.run()
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_unknown_and_ended_ids_are_ignored() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    engine.run()
    engine.scheduler.abort(["a", "never"])
    engine.scheduler.finish("a", 1)
    engine.check_nothing_leaked()


def test_finish_keeps_no_more_than_the_text_holds() -> None:
    engine = make_engine(depth=3)
    engine.add(make_request("a", num_prompt_tokens=6, max_tokens=40))
    while len(engine.outputs["a"]) < 12:
        engine.step()
    engine.finish("a", 3)
    assert len(engine.requests["a"].token_ids) == 9
    engine.run()
    engine.check_nothing_leaked()


def test_the_id_of_an_ended_request_may_be_used_at_once() -> None:
    engine = make_engine(depth=4)
    engine.add(make_request("a", max_tokens=30))
    for _ in range(3):
        engine.launch()
    engine.scheduler.abort(["a"])
    engine.add(make_request("a", max_tokens=5, first_token=3))
    engine.run()
    engine.check_outputs()


def test_an_error_ends_one_request_and_the_others_go_on() -> None:
    engine = make_engine()
    engine.add(make_request("a", num_prompt_tokens=9, max_tokens=20))
    engine.add(make_request("b", num_prompt_tokens=9, max_tokens=20, first_token=1))
    for _ in range(4):
        engine.step()
    engine.worker.rows_to_break.add(engine.requests["a"].row)
    engine.run()
    assert engine.last_delta["a"].finish_reason == "error"
    assert engine.last_delta["a"].error == "broken"
    assert engine.last_delta["b"].finish_reason == "length"
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_what_an_error_leaves_behind_is_never_found_in_the_cache() -> None:
    engine = make_engine()
    engine.add(make_request("shared", num_prompt_tokens=16, max_tokens=2))
    engine.run()
    # Its prompt hits the cache; while it and another user of the same prompt run, it breaks.
    engine.add(make_request("bad", num_prompt_tokens=16, max_tokens=20))
    engine.add(make_request("other", num_prompt_tokens=16, max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.worker.rows_to_break.add(engine.requests["bad"].row)
    engine.run()
    assert engine.last_delta["other"].finish_reason == "length"
    after = engine.add(make_request("after", num_prompt_tokens=16, max_tokens=20))
    engine.run()
    assert after.num_cached_tokens == 0
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_a_row_without_the_token_it_owes_is_an_error_not_a_stuck_request() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    plan = engine.scheduler.schedule()
    assert plan is not None
    (delta,) = engine.scheduler.update(plan, output_of(plan, [Result([])]))
    assert delta.finish_reason == "error"
    engine.check_nothing_leaked()


def test_results_out_of_launch_order_are_refused() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(EngineError, match="step 2 came while step 1 was due"):
        engine.scheduler.update(second, ModelOutput(second.step_id, [1]))


def test_tokens_that_are_not_one_for_each_row_that_samples_are_refused() -> None:
    engine = make_engine(max_num_tokens=8, max_prefill_tokens=8)
    engine.add(make_request("a"))
    engine.add(make_request("b", first_token=1))
    plan = engine.scheduler.schedule()
    assert plan is not None and [row.samples for row in plan.scheduled] == [True, False]
    with pytest.raises(EngineError, match="step 1 samples 1 rows and 2 tokens came of it"):
        engine.scheduler.update(plan, ModelOutput(plan.step_id, [1, 2]))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_requests_that_cannot_all_grow_are_preempted_and_lose_nothing(depth: int) -> None:
    engine = make_engine(num_blocks=16, depth=depth)
    for i in range(6):
        engine.add(make_request(f"r{i}", num_prompt_tokens=8, max_tokens=50, first_token=i))
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 0
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_the_first_in_order_is_never_preempted() -> None:
    engine = make_engine(num_blocks=16, policy="priority")
    engine.add(make_request("low", num_prompt_tokens=8, max_tokens=50, priority=1))
    engine.add(make_request("high", num_prompt_tokens=8, max_tokens=50, priority=90, first_token=1))
    engine.add(make_request("late", num_prompt_tokens=8, max_tokens=50, priority=90, first_token=2))
    while not engine.requests["high"].is_finished:
        engine.step()
        assert engine.requests["high"].status is not RequestStatus.PREEMPTED
    assert engine.scheduler.counters.num_preemptions > 0
    engine.run()
    engine.check_outputs()


def test_a_preempted_request_runs_again_before_those_that_came_later() -> None:
    engine = make_engine(num_blocks=16, max_batch_size=3)
    for i in range(6):
        engine.add(make_request(f"r{i}", num_prompt_tokens=12, max_tokens=40, first_token=i))
    ends: list[str] = []
    preempted: set[str] = set()
    while engine.scheduler.has_work():
        engine.step()
        waiting = sorted(engine.scheduler.waiting, key=engine.scheduler.policy.key)
        states = [request.status for request in waiting]
        assert states == sorted(states, key=lambda status: status is RequestStatus.WAITING)
        preempted |= {request.request_id for request in waiting if request.status is RequestStatus.PREEMPTED}
        ends += [r for r, request in engine.requests.items() if request.is_finished and r not in ends]
    assert preempted
    engine.check_outputs()


def test_a_preempted_request_is_not_let_in_before_its_plans_have_come_back() -> None:
    engine = make_engine(num_blocks=16, depth=4)
    for i in range(3):
        engine.add(make_request(f"r{i}", num_prompt_tokens=16, max_tokens=40, first_token=i))
    seen = False
    while engine.scheduler.has_work():
        engine.step()
        in_flight = {row.row for plan in engine.worker.launched for row in plan.scheduled}
        for request in engine.scheduler.waiting:
            seen |= request.status is RequestStatus.PREEMPTED and bool(in_flight)
    assert seen
    engine.check_outputs()


def test_larger_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = make_engine(max_batch_size=1, policy="priority", depth=1)
    for request_id, priority in [("a", 10), ("b", 90), ("c", 10), ("d", 90)]:
        engine.add(make_request(request_id, max_tokens=1, priority=priority, first_token=ord(request_id)))
    order: list[str] = []
    while engine.scheduler.has_work():
        engine.step()
        order += [r for r in engine.last_delta if r not in order]
    assert order == ["b", "d", "a", "c"]


def test_nobody_is_overtaken_for_longer_than_priorities_differ() -> None:
    engine = make_engine(max_batch_size=1, policy="priority", depth=1)
    now = 0.0
    engine.scheduler.now = lambda: now
    engine.add(make_request("old", max_tokens=1, priority=0))
    for second in range(100):
        now = float(second)
        engine.add(make_request(f"new{second}", max_tokens=2, priority=40, first_token=second))
        engine.step()
    assert engine.requests["old"].is_finished
    ended = [request_id for request_id, delta in engine.last_delta.items() if delta.finish_reason is not None]
    # Those that came in its first 40 seconds, in which one level of priority more or less made the difference.
    assert ended[: ended.index("old")] == [f"new{i}" for i in range(ended.index("old"))]
    assert 39 <= ended.index("old") <= 41
    engine.run()


def test_a_static_batch_ends_before_the_next_one_begins() -> None:
    engine = make_engine(capacity_policy="STATIC_BATCH", max_batch_size=4, depth=2)
    for i in range(6):
        engine.add(make_request(f"r{i}", max_tokens=3 + i, first_token=i))
    engine.run()
    admitting = [plan.step_id for plan in engine.plans if plan.admitted]
    assert len(admitting) == 2
    first, second = [plan for plan in engine.plans if plan.admitted]
    assert (len(first.admitted), len(second.admitted)) == (4, 2)
    assert set(second.freed_rows) or any(plan.freed_rows for plan in engine.plans if plan.step_id < second.step_id)
    engine.check_outputs()


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    engine = make_engine(max_num_tokens=32, depth=2, num_blocks=64)
    for i in range(4):
        engine.add(make_request(f"r{i}", num_prompt_tokens=40, max_tokens=3))
    engine.add(make_request("other", num_prompt_tokens=8, max_tokens=3, first_token=5))
    engine.step()
    # Nobody who computes something else waits behind those that wait for the first.
    assert {*engine.scheduler.running} == {engine.requests["r0"]} or engine.requests["other"].row >= 0
    engine.run()
    totals = engine.scheduler.stats().totals
    assert totals.num_prefill_tokens == 40 + 8 + 3
    assert [engine.requests[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 39, 39, 39]
    engine.check_outputs()


def test_a_request_does_not_wait_for_a_prefix_that_is_little_of_what_it_lacks() -> None:
    engine = make_engine(max_num_tokens=64, depth=1, num_blocks=64)
    engine.add(Request("a", list(range(40)), SamplingSpec(max_tokens=2)))
    engine.add(Request("b", [*range(8), *range(50, 82)], SamplingSpec(max_tokens=2)))
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.run()
    engine.check_outputs()


def test_one_that_waits_for_a_prefix_computes_it_when_the_other_is_aborted() -> None:
    engine = make_engine(max_num_tokens=32, max_prefill_tokens=32, depth=2)
    for request_id in ("a", "b"):
        engine.add(make_request(request_id, num_prompt_tokens=60, max_tokens=3))
    engine.step()
    assert list(engine.scheduler.running) == [engine.requests["a"]]
    engine.abort("a")
    engine.run()
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_a_more_important_prompt_overtakes_a_long_prefill() -> None:
    engine = make_engine(max_num_tokens=8, max_prefill_tokens=8, policy="priority", depth=1)
    engine.add(make_request("long", num_prompt_tokens=50, priority=10, max_tokens=1))
    engine.step()
    engine.add(make_request("urgent", num_prompt_tokens=8, priority=90, max_tokens=1, first_token=1))
    engine.step()
    assert engine.requests["urgent"].is_finished
    engine.run()
    engine.check_outputs()


def test_guaranteed_no_evict_never_preempts() -> None:
    engine = make_engine(num_blocks=20, capacity_policy="GUARANTEED_NO_EVICT")
    for i in range(8):
        engine.add(make_request(f"r{i}", num_prompt_tokens=8, max_tokens=5 + 7 * (i % 4), first_token=i % 3))
    engine.run()
    assert engine.scheduler.counters.num_preemptions == 0
    engine.check_outputs()


def test_admission_leaves_the_watermark_to_those_that_run() -> None:
    engine = make_engine(num_blocks=20, watermark=0.5, max_seq_len=64, depth=1)
    engine.add(make_request("a", num_prompt_tokens=8, max_tokens=2))
    engine.add(make_request("b", num_prompt_tokens=36, max_tokens=2, first_token=1))
    engine.step()
    assert len(engine.scheduler.running) == 1
    engine.run()
    engine.check_outputs()


def test_a_lone_request_may_use_the_whole_pool() -> None:
    engine = make_engine(num_blocks=16, max_seq_len=64, watermark=0.5)
    for i in range(3):
        engine.add(make_request(f"r{i}", num_prompt_tokens=60, max_tokens=4, first_token=i))
        engine.run()
    assert engine.scheduler.counters.num_preemptions == 0
    engine.check_outputs()


def test_a_survivor_of_equal_prompts_may_still_use_the_whole_pool() -> None:
    engine = make_engine(num_blocks=16, max_seq_len=64, depth=1)
    engine.add(make_request("short", num_prompt_tokens=24, max_tokens=2))
    engine.add(make_request("long", num_prompt_tokens=24, max_tokens=40))
    engine.run()
    engine.check_outputs()


def test_a_row_freed_and_given_away_in_one_plan_belongs_to_the_new_request() -> None:
    engine = make_engine(max_batch_size=1, depth=4)
    for i in range(4):
        engine.add(make_request(f"r{i}", max_tokens=3, first_token=i))
    engine.run()
    assert any(row in plan.freed_rows for plan in engine.plans for row in [a.row for a in plan.admitted])
    engine.check_outputs()


def test_several_groups_get_blocks_in_step() -> None:
    cache = KVCacheManager(CacheLayout(10, (GroupLayout(4), GroupLayout(4))), 4)
    scheduler = Scheduler(SchedulerLimits(4, 32, 16, 64), cache)
    engine = Engine(scheduler, depth=2)
    for i in range(5):
        engine.add(make_request(f"r{i}", num_prompt_tokens=18, max_tokens=30, first_token=i % 2))
    engine.run()
    engine.check_outputs()
    engine.check_nothing_leaked()


def test_a_request_denied_for_want_of_room_is_not_matched_again_until_something_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(num_blocks=16, max_batch_size=4, depth=1)
    engine.add(make_request("a", num_prompt_tokens=40, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(make_request("b", num_prompt_tokens=40, max_tokens=2, first_token=1))
    tree = engine.scheduler.cache.tree
    calls: list[int] = []
    match = tree.match
    monkeypatch.setattr(tree, "match", lambda *args: calls.append(1) or match(*args))
    for _ in range(10):
        engine.step()
    assert len(calls) == 1
    engine.run()
    engine.check_outputs()


def test_counters_tell_what_happened() -> None:
    engine = make_engine(depth=1)
    engine.add(make_request("a", num_prompt_tokens=16, max_tokens=5))
    engine.run()
    engine.add(make_request("b", num_prompt_tokens=16, max_tokens=5))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (1, 0, 64)
    assert stats.totals.num_prefix_query_tokens == 32
    assert stats.totals.num_prefix_hit_tokens == 15
    assert stats.totals.num_prefill_tokens == 17
    engine.run()
    totals = engine.scheduler.stats().totals
    assert totals.num_decode_tokens == 8
    assert totals.num_output_tokens == 10
    assert totals.num_finished_requests == {"stop": 0, "length": 2, "cancelled": 0, "error": 0}
    assert stats.totals.num_finished_requests["length"] == 1, "an earlier snapshot has moved"


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = make_engine(max_seq_len=16)
    with pytest.raises(ContextLengthError, match="has 16 tokens and max_seq_len is 16: shorten it to 15"):
        engine.add(make_request("a", num_prompt_tokens=16))
    with pytest.raises(RequestError, match="no tokens"):
        engine.add(make_request("a", num_prompt_tokens=0))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.add(make_request("a", max_tokens=0))
    engine.add(make_request("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(make_request("a"))
    engine.run()
    engine.check_nothing_leaked()


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_tokens \(8\) must be at least max_batch_size \(9\)"):
        SchedulerLimits(9, 8, 8, 64)
    with pytest.raises(ConfigError, match="max_prefill_tokens is 0"):
        SchedulerLimits(4, 8, 0, 64)
    with pytest.raises(ConfigError, match="STATIC"):
        SchedulerLimits(4, 8, 8, 64, capacity_policy="STATIC")
    with pytest.raises(ConfigError, match="'fcfs' or 'priority'"):
        make_engine(policy="lifo")
    with pytest.raises(ConfigError, match="lower it to 40"):
        make_engine(num_blocks=10, max_seq_len=64)
