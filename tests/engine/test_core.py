# SPDX-License-Identifier: Apache-2.0
"""The loop: what is launched when, and what of it reaches whom."""

from pathlib import Path

import pytest
from fake_worker import NUM_BLOCKS, FakeWorker, LateWorker, device_facts

from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.request import SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.ipc import EngineRequest
from headrace.utils.hub import ModelSource


@pytest.fixture
def config(args: LlmArgs, model_folder: Path) -> ResolvedConfig:
    source = ModelSource("hf", model_folder, "tiny", "tiny")
    return resolve(args, load_model_config(source), device_facts("cpu"))


def request(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingSpec(temperature=0.0, max_tokens=max_tokens))


def core_with(config: ResolvedConfig, worker: FakeWorker, depth: int) -> EngineCore:
    return EngineCore(Scheduler.from_config(config, CacheLayout.plain(NUM_BLOCKS)), worker, depth)


def outputs(core: EngineCore, step: str) -> dict[str, list[int]]:
    """Every request's output tokens, run to the end by the method named."""
    found: dict[str, list[int]] = {}
    while core.has_work:
        deltas = core.step() if step == "step" else core.step_overlapped()
        for delta in deltas:
            found.setdefault(delta.request_id, []).extend(delta.new_token_ids)
        core.scheduler.check_invariants()
    return found


def test_step_n_plus_1_is_launched_before_the_result_of_step_n_is_known(config: ResolvedConfig) -> None:
    worker = LateWorker(config, ModelSource("hf", Path(), "", ""))
    core = core_with(config, worker, 2)
    core.add(request("a", [1, 2, 3], 8))
    assert outputs(core, "step_overlapped") == {"a": [1, 2, 3, 1, 2, 3, 1, 2]}
    worker.shutdown()
    at = {event: index for index, event in enumerate(worker.log)}
    for step_id in range(1, 8):
        assert at["launched", step_id + 1] < at["computed", step_id]
    assert ("launched", 9) not in at, "max_tokens was covered by the plans in flight"


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_any_depth_gives_the_tokens_of_the_plain_step(config: ResolvedConfig, depth: int) -> None:
    prompts = {f"r{i}": [(7 * i + j) % 250 for j in range(1 + 13 * i)] for i in range(12)}
    results = []
    for step, how_deep, worker_type in (("step", 1, FakeWorker), ("step_overlapped", depth, LateWorker)):
        worker = worker_type(config, ModelSource("hf", Path(), "", ""))
        core = core_with(config, worker, how_deep)
        for name, prompt in prompts.items():
            core.add(request(name, prompt, 1 + len(prompt) % 9))
        results.append(outputs(core, step))
        worker.shutdown()
    assert results[0] == results[1]
    assert results[0]["r11"] == prompts["r11"][: len(results[0]["r11"])]


def test_an_abort_between_steps_frees_everything(config: ResolvedConfig) -> None:
    worker = LateWorker(config, ModelSource("hf", Path(), "", ""))
    core = core_with(config, worker, 2)
    for i in range(12):
        core.add(request(f"r{i}", [i] * 40, 30))
    for _ in range(5):
        core.step_overlapped()
    core.abort([f"r{i}" for i in range(12)])
    while core.has_work:
        assert core.step_overlapped() == []
    worker.shutdown()
    core.scheduler.check_invariants()
    stats = core.stats()
    assert stats["num_used_blocks"] == 0 and stats["num_running"] == stats["num_waiting"] == 0


def test_a_stop_string_seen_by_the_front_end_ends_the_request_in_the_core(config: ResolvedConfig) -> None:
    core = core_with(config, FakeWorker(config, ModelSource("hf", Path(), "", "")), 2)
    core.add(request("a", [1, 2, 3], 100))
    for _ in range(6):
        core.step_overlapped()
    core.finish("a", 3)
    while core.has_work:
        assert core.step_overlapped() == []
    assert core.stats()["totals"]["num_finished_requests"]["stop"] == 1
