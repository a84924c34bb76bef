# SPDX-License-Identifier: Apache-2.0
"""The host's share of a step is small. Bounds are ten times what a laptop needs, and the best of many steps counts."""

import time

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.output import ModelOutput
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler, SchedulerLimits


def test_a_step_of_256_decodes_costs_well_under_a_millisecond() -> None:
    scheduler = Scheduler(SchedulerLimits(256, 8192, 2048, 4096), KVCacheManager(CacheLayout.plain(20_000), 32))
    for i in range(256):
        scheduler.add_request(Request(f"r{i}", [i] * (100 + i % 32), SamplingSpec(max_tokens=1000)))
    costs: list[float] = []
    for _ in range(200):
        began = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        output = ModelOutput(plan.step_id, [7] * (len(plan.decode_rows) + sum(chunk.samples for chunk in plan.chunks)))
        updating = time.perf_counter()
        scheduler.update(plan, output)
        if len(plan.scheduled) == 256 == plan.num_tokens:
            costs.append(time.perf_counter() - updating + scheduled - began)
    assert len(costs) > 100
    assert min(costs) < 2e-3, f"schedule and update took {min(costs) * 1e6:.0f} us"


def test_finding_100k_cached_tokens_takes_milliseconds() -> None:
    cache = KVCacheManager(CacheLayout.plain(4000), 32)
    tokens = list(range(100_000))
    table = cache.open(tokens, (), len(tokens), spare=0.0, use_cache=True)
    assert table is not None
    cache.extend(table, len(tokens))
    cache.close(table, tokens, len(tokens))
    costs: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        table = cache.open(tokens, (), len(tokens), spare=0.0, use_cache=True)
        costs.append(time.perf_counter() - began)
        assert table is not None and table.num_cached_tokens == 99_999
        cache.close(table, tokens, 99_968)
    assert min(costs) < 50e-3, f"opening took {min(costs) * 1e3:.1f} ms"
