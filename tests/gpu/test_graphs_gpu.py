# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs give what the same padded steps give one kernel at a time, and show nothing of an earlier step."""

import json
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import resolve
from headrace.core.output import ModelOutput, SchedulerOutput
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.models.base import CausalLM
from headrace.utils.hub import resolve_model
from headrace.worker.device import device_facts
from headrace.worker.graph_pool import Graph, GraphPool
from headrace.worker.model_runner import Padding
from headrace.worker.worker import Worker

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU"),
]
VOCAB = 1000
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "eos_token_id": 1,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
    "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


class Uncaptured(Worker):
    """The same steps, padded alike, one kernel at a time."""

    def _padding(self, model: CausalLM) -> Padding | None:
        padding = super()._padding(model)
        return None if padding is None else replace(padding, captures=False)


def started(folder: Path, cls: type[Worker] = Worker, **settings: object) -> tuple[Worker, Scheduler]:
    """A worker with random weights, the same each time, and a scheduler for it."""
    args = LlmArgs(
        model=str(folder), load_format="dummy", max_batch_size=24, max_num_tokens=512, max_seq_len=1024,
        scheduler_config={"max_prefill_tokens": 200}, kv_cache_config={"max_tokens": 12_000}, **settings,
    )  # fmt: skip
    source = resolve_model(str(folder), need_weights=False)
    config = resolve(args, load_model_config(source), device_facts("cuda"))
    worker = cls(config, source)
    info = worker.start(lambda *_: None)
    while worker.use_idle_time():
        pass
    return worker, Scheduler.from_config(config, info.layout)


def requests(count: int) -> list[Request]:
    """Short and long prompts, some that share a beginning, greedy and drawn, a few with more to do."""
    rng = random.Random(5)
    shared = [rng.randrange(VOCAB) for _ in range(600)]
    made = []
    for index in range(count):
        prompt = shared[: rng.choice((0, 40, 500))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120))]
        spec: dict[str, object] = {"temperature": 0.0, "max_tokens": rng.randrange(1, 60)}
        if index % 5 == 3:
            spec |= {"temperature": 0.9, "top_p": 0.9, "seed": index}
        if index % 11 == 7:
            spec |= {"logprobs": 3, "repetition_penalty": 1.2}
        if index % 50 == 49:
            spec |= {"prompt_logprobs": 1}
        made.append(Request(f"r{index}", prompt, SamplingSpec(**spec)))
    return made


def run(worker: Worker, scheduler: Scheduler, todo: list[Request]) -> list[tuple[SchedulerOutput, ModelOutput]]:
    """Two plans in flight; requests come in bursts, and some are aborted. What was planned and what came of it."""
    rng = random.Random(8)
    todo, flight, done = list(todo), deque(), []
    while todo or scheduler.has_work() or flight:
        if todo and rng.random() < 0.3:
            for _ in range(min(len(todo), rng.randrange(1, 20))):
                scheduler.add_request(todo.pop())
        if rng.random() < 0.02 and scheduler.running:
            scheduler.abort([next(iter(scheduler.running)).request_id])
        while len(flight) < 2 and (plan := scheduler.schedule()) is not None:
            worker.forward(plan)
            flight.append((plan, worker.sample(plan)))
        if flight:
            plan, pending = flight.popleft()
            output = pending.wait()
            done.append((plan, output))
            scheduler.update(plan, output)
    return done


def test_graphs_give_the_tokens_of_the_same_plans_run_kernel_by_kernel(folder: Path) -> None:
    worker, scheduler = started(folder)
    assert worker._runner is not None and worker._runner._padded is not None
    assert worker._runner._padded.num_captured > 20
    done = run(worker, scheduler, requests(200))
    scheduler.check_invariants()
    assert scheduler.stats().num_used_blocks == 0
    worker.shutdown()
    sizes = {sum(row.num_tokens for row in plan.scheduled) for plan, _ in done}
    assert min(sizes) == 1 and max(sizes) > 200
    plain, _ = started(folder, Uncaptured)
    flight: deque = deque()
    for plan, output in done:
        plain.forward(plan)
        flight.append((plain.sample(plan), output))
        if len(flight) == 2:
            again, before = flight.popleft()
            assert again.wait() == before
    plain.shutdown()


def test_every_decode_size_is_captured_and_none_above_the_largest_batch(folder: Path) -> None:
    worker, _ = started(folder)
    assert worker._runner is not None and worker._runner._padded is not None
    padded = worker._runner._padded
    assert max(size.num_rows for size in padded._sizes.body_sizes()) == 24
    assert padded.num_captured == len(padded._sizes.body_sizes()) + 2 * len(padded._sizes.decode)
    worker.shutdown()


def test_no_kernel_is_compiled_while_serving(folder: Path) -> None:
    worker, scheduler = started(folder)
    compiled: list[str] = []
    knobs = triton.knobs
    hook = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(str(kwargs.get("repr", args[:1])))
    try:
        run(worker, scheduler, requests(120))
    finally:
        knobs.runtime.jit_post_compile_hook = hook
    worker.shutdown()
    assert not compiled
    torch.cuda.synchronize()


def test_null_turns_graphs_off(folder: Path) -> None:
    worker, _ = started(folder, cuda_graph_config=None)
    assert worker._runner is not None and worker._runner._padded is None
    worker.shutdown()


def test_a_capture_that_runs_out_of_memory_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that really fails leaves nothing behind, on the stream or in the allocator, that the next one meets."""
    capture, calls = GraphPool.capture, 0

    def short_of_memory(self: GraphPool, call: Callable[[], None]) -> Graph:
        nonlocal calls
        calls += 1

        def too_much() -> None:
            call()
            torch.empty(torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")

        return capture(self, too_much if calls % 3 == 2 else call)

    monkeypatch.setattr(GraphPool, "capture", short_of_memory)
    worker, scheduler = started(folder)
    assert worker._runner is not None and worker._runner._padded is not None
    padded = worker._runner._padded
    assert calls > 20 and padded.num_captured == calls - (calls + 1) // 3
    outputs = [output for _, output in run(worker, scheduler, requests(60))]
    assert outputs and not any(output.errors for output in outputs)
    assert scheduler.stats().num_used_blocks == 0
    worker.shutdown()
