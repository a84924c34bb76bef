# SPDX-License-Identifier: Apache-2.0
"""Random traffic on a scheduler whose worker answers late: nothing is lost, mixed up, leaked or starved."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_worker import EOS, Engine

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout, GroupLayout
from headrace.core.request import Request, SamplingSpec
from headrace.core.retention import Retention
from headrace.core.scheduler import Scheduler, SchedulerLimits

MAX_STEPS_LEFT = 5_000


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    """One group, or some of unlike block sizes, with and without windows, that fight for slabs."""
    if draw(st.booleans()):
        return CacheLayout.plain(draw(st.integers(4, 24)))
    per_slab = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    windows = [None, *[draw(st.sampled_from([None, None, 1, 3, 8])) for _ in per_slab[1:]]]
    groups = tuple(GroupLayout(n, window, 16 // n) for n, window in zip(per_slab, windows, strict=True))
    return CacheLayout(draw(st.integers(4 * len(groups), 24)), groups)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Small pools, so that requests fight for them, and every setting that changes who runs."""
    tokens_per_block = draw(st.sampled_from([1, 2, 4]))
    layout = draw(layouts())
    depth = draw(st.integers(1, 4))
    max_batch_size = draw(st.integers(1, 6))
    max_num_tokens = max_batch_size + draw(st.integers(0, 20))
    cache = KVCacheManager(
        layout,
        tokens_per_block,
        enable_block_reuse=draw(st.sampled_from([True, True, True, False])),
        enable_partial_reuse=draw(st.booleans()),
        copy_on_partial_reuse=draw(st.booleans()),
        max_tokens_in_flight=max_num_tokens * depth,
    )
    longest = min(cache.most_tokens(100 * tokens_per_block), 24 * tokens_per_block)
    limits = SchedulerLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_prefill_tokens=draw(st.integers(1, 12)),
        max_seq_len=max(2, draw(st.integers(longest // 2, longest))),
        watermark=draw(st.sampled_from([0.0, 0.1, 0.4])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        capacity_policy=draw(
            st.sampled_from(["MAX_UTILIZATION", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"])
        ),
        enable_chunked_prefill=draw(st.sampled_from([True, True, False])),
    )
    engine = Engine(Scheduler(limits, cache), depth=depth)
    if draw(st.booleans()):
        engine.follow_events()
    engine.worker.counts = draw(st.booleans())
    if draw(st.booleans()):
        rng = random.Random(draw(st.integers(0, 1000)))
        fail_rate = draw(st.sampled_from([0.0, 0.0, 0.2]))
        engine.add_host(
            draw(st.integers(1, 40)),
            draw(st.sampled_from([0, 35, 60])),
            rng=draw(st.sampled_from([None, rng])),
            fails=lambda transfer, index: rng.random() < fail_rate,
            store=draw(st.sampled_from([None, {}])),
        )
    return engine


@st.composite
def requests(draw: st.DrawFn, request_id: str, max_seq_len: int) -> Request:
    """Prompts that share beginnings; few tokens, so that conversations meet again in the cache."""
    base = draw(st.integers(0, 2))
    num_shared = draw(st.integers(0, max_seq_len))
    prompt = [(base * 3 + i % 5) % 11 for i in range(num_shared)] + draw(st.lists(st.integers(0, 3), max_size=6))
    salt = draw(st.sampled_from([0, 0, 0, 1]))
    sampling = SamplingSpec(
        max_tokens=draw(st.integers(1, max_seq_len)),
        min_tokens=draw(st.integers(0, 3)),
        seed=salt,
        eos_token_ids=draw(st.sampled_from([[], [EOS], list(range(0, 997, 10))])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    prompt = prompt[: max_seq_len - 1] or [1]
    priority = draw(st.integers(0, 100))
    retention = Retention([(0, len(prompt), draw(st.integers(0, 100)), draw(st.sampled_from([None, 0, 5])))], 20, 10)
    retention = draw(st.sampled_from([None, None, retention]))
    return Request(request_id, prompt, sampling, priority=priority, cache_salt=str(salt), retention=retention)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(engine=engines())
    def start(self, engine: Engine) -> None:
        self.engine = engine
        self.num_added = 0

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.num_added += 1
            max_seq_len = self.engine.scheduler.limits.max_seq_len
            self.engine.add(data.draw(requests(f"r{self.num_added}", max_seq_len)))

    @rule(count=st.integers(1, 12))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.scheduler.check_invariants()

    @precondition(lambda self: len(self.engine.worker.launched) < self.engine.depth)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.transfers is not None)
    @rule()
    def move_blocks(self) -> None:
        self.engine.move_blocks()

    @precondition(lambda self: self.engine.worker.launched)
    @rule()
    def collect(self) -> None:
        self.engine.collect()

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.alive())))

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(data=st.data(), share=st.floats(0, 1))
    def finish(self, data: st.DataObject, share: float) -> None:
        request_id = data.draw(st.sampled_from(self.alive()))
        self.engine.finish(request_id, int(share * len(self.engine.outputs[request_id])))

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def break_row(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.engine.scheduler.running)))
        if request.num_launched_tokens == request.num_computed_tokens and request.row in self.engine.worker.rows:
            self.engine.worker.rows_to_break.add(request.row)

    def alive(self) -> list[str]:
        return [r for r, request in self.engine.requests.items() if not request.is_finished]

    @invariant()
    def holds(self) -> None:
        self.engine.scheduler.check_invariants()
        self.engine.check_events()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(MAX_STEPS_LEFT)
            self.engine.check_outputs()
            self.engine.check_nothing_leaked()
            self.engine.check_events()
            if self.engine.scheduler.limits.capacity_policy != "MAX_UTILIZATION":
                assert self.engine.scheduler.counters.num_preemptions == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(max_examples=25, deadline=None, database=None)
@given(random=st.randoms(use_true_random=False), depth=st.integers(1, 4), policy=st.sampled_from(["fcfs", "priority"]))
def test_a_long_crowded_run_ends_with_the_outputs_of_a_plain_one(random, depth, policy) -> None:  # type: ignore[no-untyped-def]
    limits = SchedulerLimits(6, 24, 10, 80, watermark=0.1, policy=policy)
    engine = Engine(Scheduler(limits, KVCacheManager(CacheLayout.plain(24), 4)), depth)
    for i in range(30):
        prompt = [random.randrange(2) for _ in range(random.randrange(1, 60))]
        sampling = SamplingSpec(max_tokens=random.randrange(1, 60), eos_token_ids=[EOS])
        engine.add(Request(f"r{i}", prompt, sampling, priority=random.randrange(3)))
        for _ in range(random.randrange(12)):
            engine.step()
    engine.run(MAX_STEPS_LEFT)
    engine.check_outputs()
    engine.check_nothing_leaked()
