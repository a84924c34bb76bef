# SPDX-License-Identifier: Apache-2.0
"""Blocks go to the host and outside and come back while a real worker answers: never another token, less computed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_windows
from test_worker import HF, started, with_tiers
from test_worker import config_of as plain_config_of
from transfers import NamedStore

from headrace.config.kv_connector import KvCacheConnectorConfig
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig
from headrace.core import block_moves
from headrace.core.request import SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.ipc import EngineRequest

NUM_BLOCKS = 14
"""On the device: room for a request and little else."""
LONGEST = 100


class Served:
    """An engine's core over a worker with tiers, driven by hand."""

    def __init__(self, config: ResolvedConfig, depth: int = 2, num_blocks: int = NUM_BLOCKS) -> None:
        config = replace(config, max_seq_len=LONGEST)
        self.worker, info = started(config)
        layout = replace(
            info.layout, groups=tuple(replace(each, blocks_per_slab=num_blocks) for each in info.layout.groups)
        )
        layout = layout if len(layout.groups) == 1 else replace(info.layout, num_slabs=2 * num_blocks)
        self.scheduler = Scheduler.from_config(config, layout, None, info.num_host_blocks)
        self.core = EngineCore(self.scheduler, self.worker, depth)
        self.num_cached: dict[str, int] = {}
        self.num_asked = 0

    def ask(self, *prompts: list[int], max_tokens: int = 10) -> list[list[int]]:
        """What each prompt is answered with, when they come together."""
        names = [f"r{self.num_asked + index}" for index in range(len(prompts))]
        self.num_asked += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.core.add(EngineRequest(name, prompt, SamplingSpec(temperature=0.0, max_tokens=max_tokens)))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        until = time.monotonic() + 60
        while self.core.has_work:
            assert time.monotonic() < until, "somebody waits for ever"
            for delta in self.core.step_overlapped():
                assert delta.error is None
                tokens[delta.request_id] += delta.new_token_ids
                self.num_cached[delta.request_id] = delta.num_cached_tokens
            self.scheduler.check_invariants()
        self.last_cached = [self.num_cached[name] for name in names]
        return list(tokens.values())


@contextmanager
def served(config: ResolvedConfig, depth: int = 2, num_blocks: int = NUM_BLOCKS) -> Iterator[Served]:
    engine = Served(config, depth, num_blocks)
    try:
        yield engine
    finally:
        engine.worker.shutdown()


def prompts(count: int = 5) -> list[list[int]]:
    return [[(i * (37 + 2 * n) + 5 + n) % 151 for i in range(80 - n)] for n in range(count)]


def config_of(**settings: Any) -> ResolvedConfig:
    return plain_config_of(kv_cache_config={"tokens_per_block": 8, **settings})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with served(config_of(), num_blocks=200) as engine:
        return [engine.ask(prompt)[0] for prompt in prompts()]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_the_device_gave_up_comes_back_from_the_host(expected: list[list[int]], depth: int) -> None:
    with served(with_tiers(config_of(), host_cache_size=1 << 20), depth) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert engine.last_cached == [0]
        for prompt, answer in zip(prompts(), expected, strict=True):
            assert engine.ask(prompt)[0] == answer
            assert engine.last_cached == [(len(prompt) - 1) // 8 * 8]
        totals = engine.scheduler.counters
        assert totals.num_onboarded_blocks >= 30 and totals.num_offloaded_blocks >= 40
        assert engine.core.stats()["num_used_host_blocks"] >= 40
        # And all together, when there is not room for two: they preempt each other or wait, and come back.
        assert engine.ask(*prompts()) == expected


@pytest.mark.parametrize("dtype", ["fp8", "int8", "bfloat16"])
def test_caches_of_fewer_bits_come_back_as_they_were(dtype: str) -> None:
    with served(config_of(dtype=dtype), num_blocks=200) as engine:
        alone = [engine.ask(prompt)[0] for prompt in prompts()]
    with served(with_tiers(config_of(dtype=dtype), host_cache_size=1 << 20, dtype=dtype)) as engine:
        for _ in range(2):
            assert [engine.ask(prompt)[0] for prompt in prompts()] == alone
        assert engine.last_cached[0] > 0


def test_windows_come_back_with_what_the_next_token_sees() -> None:
    config = replace(config_of(), model=ModelConfig.from_hf(test_windows.HF))
    with served(config, num_blocks=200) as engine:
        assert len(engine.scheduler.cache.layout.groups) == 2
        alone = [engine.ask(prompt)[0] for prompt in prompts()]
    with served(with_tiers(config, host_cache_size=1 << 20), num_blocks=12) as engine:
        for _ in range(2):
            assert [engine.ask(prompt)[0] for prompt in prompts()] == alone
        assert engine.last_cached[0] >= 64
        assert engine.scheduler.counters.num_onboarded_blocks > 0
        assert engine.ask(*prompts()) == alone


def test_a_host_that_holds_little_keeps_what_was_used_last(expected: list[list[int]]) -> None:
    block_bytes = 2 * HF["num_hidden_layers"] * 2 * 8 * 8 * 4
    with served(with_tiers(config_of(), host_cache_size=24 * block_bytes)) as engine:
        for _ in range(2):
            assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert engine.ask(prompts()[3])[0] == expected[3]
        assert engine.last_cached[0] > 0


def test_blocks_of_a_low_priority_are_dropped(expected: list[list[int]]) -> None:
    config = with_tiers(config_of(), host_cache_size=1 << 20, secondary_offload_min_priority=36)
    with served(config) as engine:
        for _ in range(2):
            assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert engine.last_cached == [0]
        assert engine.scheduler.counters.num_offloaded_blocks == 0


def test_a_bit_that_flips_on_the_host_costs_a_computation_and_no_token(expected: list[list[int]]) -> None:
    with served(with_tiers(config_of(), host_cache_size=1 << 20)) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        host = engine.worker._transfers.host  # type: ignore[union-attr]
        for block in range(host.layout.num_units):
            np.frombuffer(host.memory(0, block), np.uint8)[block % 64] ^= 4
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert engine.scheduler.counters.num_onboarded_blocks == 0


# Outside storage


def on_disk(path: Path) -> ResolvedConfig:
    return with_tiers(config_of(), host_cache_size=1 << 20, disk_cache_path=str(path), disk_cache_size=1 << 24)


def test_the_disk_brings_back_after_a_restart_what_was_computed_before(
    expected: list[list[int]], tmp_path: Path
) -> None:
    with served(on_disk(tmp_path)) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
    assert list(tmp_path.rglob("*.kv"))
    with served(on_disk(tmp_path)) as engine:
        num_cached = []
        for prompt, answer in zip(prompts(), expected, strict=True):
            assert engine.ask(prompt)[0] == answer
            num_cached += engine.last_cached
        # The last one may never have left the device.
        assert sum(count >= 64 for count in num_cached) >= 3
        assert engine.scheduler.counters.num_fetched_blocks >= 24


def test_files_that_are_damaged_cost_a_computation_and_no_token(expected: list[list[int]], tmp_path: Path) -> None:
    with served(on_disk(tmp_path)) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
    for number, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        if number % 2:
            content[len(content) // 2] ^= 1
        else:
            del content[len(content) // 2 :]
        file.write_bytes(content)
    with served(on_disk(tmp_path)) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert engine.scheduler.counters.num_onboarded_blocks == 0


def own_connector() -> ResolvedConfig:
    connector = KvCacheConnectorConfig(connector_module="transfers", connector_worker_class="NamedStore")
    return with_tiers(config_of(), connector, host_cache_size=1 << 20)


def test_storage_that_hangs_delays_who_wants_its_blocks_for_a_while_and_nobody_else(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_moves, "PATIENCE_S", 0.3)
    with served(own_connector()) as engine:
        store = NamedStore.last
        assert store is not None
        store.gate.clear()
        began = time.monotonic()
        assert engine.ask(prompts()[0])[0] == expected[0]
        assert time.monotonic() - began >= 0.3
        # It has not answered, and is not asked.
        num_calls = store.num_calls
        assert engine.ask(prompts()[1])[0] == expected[1]
        assert engine.ask([7, 8]) and store.num_calls == num_calls
        store.gate.set()


def test_storage_that_fails_is_a_miss(expected: list[list[int]]) -> None:
    with served(own_connector()) as engine:
        store = NamedStore.last
        assert store is not None
        store.raises = OSError("no such share")
        for _ in range(2):
            assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        assert store.num_calls > 0 and engine.scheduler.counters.num_fetched_blocks == 0


def test_an_aborted_request_leaves_nothing_of_its_load_behind(expected: list[list[int]]) -> None:
    with served(with_tiers(config_of(), host_cache_size=1 << 20)) as engine:
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
        for prompt in prompts():
            engine.core.add(EngineRequest("gone", prompt, SamplingSpec(temperature=0.0, max_tokens=10)))
            engine.core.step_overlapped()
            engine.core.abort(["gone"])
            while engine.core.has_work:
                engine.core.step_overlapped()
                engine.scheduler.check_invariants()
        assert engine.scheduler.stats().num_used_blocks == 0
        assert [engine.ask(prompt)[0] for prompt in prompts()] == expected
