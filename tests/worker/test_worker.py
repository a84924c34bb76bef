# SPDX-License-Identifier: Apache-2.0
"""The whole worker over a tiny random model: starts, answers alike in every mix, fails clearly, shuts down."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transfers import NamedStore

from headrace.attention.reference import MAX_COPY_BYTES
from headrace.config.cache import KvCacheConfig
from headrace.config.kv_connector import KvCacheConnectorConfig
from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_cache_spec import CacheLayout, KvSpec, group_layers
from headrace.core.memory_estimate import activation_bytes, workspace_bytes
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.core.transfer import BlockCopy, Transfer
from headrace.errors import ConfigError, HeadraceError
from headrace.utils.hub import ModelSource
from headrace.utils.math import cdiv
from headrace.worker import memory
from headrace.worker.device import device_facts
from headrace.worker.kv_store import BlockKey
from headrace.worker.worker import Worker, WorkerInfo

HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 151, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "initializer_range": 0.3, "torch_dtype": "float32", "rope_theta": 10000.0,
}  # fmt: skip


def config_of(**settings: Any) -> ResolvedConfig:
    given = {
        "model": "tiny", "load_format": "dummy", "device": "cpu", "dtype": "float32", "num_threads": 1,
        "max_batch_size": 4, "max_num_tokens": 32, "kv_cache_config": {"tokens_per_block": 8},
        "scheduler_config": {"max_prefill_tokens": 8}, "seed": 3,
    }  # fmt: skip
    return resolve(LlmArgs(**(given | settings)), ModelConfig.from_hf(HF), device_facts("cpu"))


def started(config: ResolvedConfig) -> tuple[Worker, WorkerInfo]:
    worker = Worker(config, ModelSource("hf", Path("tiny"), "tiny", "tiny"))
    return worker, worker.start(None)


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Worker, WorkerInfo, ResolvedConfig]]:
    config = config_of()
    worker, info = started(config)
    yield worker, info, config
    worker.shutdown()


def generate(
    worker: Worker, scheduler: Scheduler, requests: dict[str, list[int]], depth: int, **sampling: Any
) -> dict[str, list[int]]:
    """The tokens of each request, with up to `depth` plans in flight."""
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for name, prompt in requests.items():
        spec = {"temperature": 0.0, "max_tokens": 12, "seed": len(prompt), **sampling}
        scheduler.add_request(Request(name, prompt, SamplingSpec(**spec)))
    flight: deque = deque()
    while scheduler.has_work() or flight:
        while len(flight) < depth and (plan := scheduler.schedule()) is not None:
            worker.forward(plan)
            flight.append((plan, worker.sample(plan)))
        plan, pending = flight.popleft()
        for delta in scheduler.update(plan, pending.wait()):
            assert delta.error is None, delta.error
            tokens[delta.request_id] += delta.new_token_ids
    return tokens


def prompts() -> dict[str, list[int]]:
    shared = [(i * 37 + 5) % 151 for i in range(60)]
    return {
        "short": [7], "long": shared, "cached": [*shared[:41], 3, 4], "other": [(i * 11) % 151 for i in range(25)],
        "edge": shared[:8], "all but one": [*shared[:16], 9],
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_tokens_do_not_depend_on_batch_chunks_cache_or_depth(
    tiny: tuple[Worker, WorkerInfo, ResolvedConfig], sampling: dict[str, Any]
) -> None:
    worker, info, config = tiny
    alone: dict[str, list[int]] = {}
    for name, prompt in prompts().items():
        scheduler = Scheduler.from_config(config, info.layout)
        alone |= generate(worker, scheduler, {name: prompt}, 1, **sampling)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    for depth in (1, 2):
        scheduler = Scheduler.from_config(config, info.layout)
        for _ in range(2):
            # The second time everything is found in the prefix cache.
            assert generate(worker, scheduler, prompts(), depth, **sampling) == alone
        scheduler.check_invariants()


def test_a_few_blocks_preempt_and_change_nothing(tiny: tuple[Worker, WorkerInfo, ResolvedConfig]) -> None:
    worker, _, config = tiny
    requests = {str(i): [(i * 31 + j) % 151 for j in range(20 + i)] for i in range(4)}
    alone: dict[str, list[int]] = {}
    for name, prompt in requests.items():
        alone |= generate(
            worker, Scheduler.from_config(config, CacheLayout.plain(16)), {name: prompt}, 1, max_tokens=40
        )
    scheduler = Scheduler.from_config(config, CacheLayout.plain(16))
    assert generate(worker, scheduler, requests, 2, max_tokens=40) == alone
    assert scheduler.counters.num_preemptions > 0


@pytest.fixture(scope="module", params=["fp8", "int8"])
def quantized(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, WorkerInfo, ResolvedConfig]]:
    config = config_of(kv_cache_config={"tokens_per_block": 8, "dtype": request.param})
    worker, info = started(config)
    yield worker, info, config
    worker.shutdown()


def test_a_cache_of_8_bits_answers_alike_in_every_mix(
    quantized: tuple[Worker, WorkerInfo, ResolvedConfig], tiny: tuple[Worker, WorkerInfo, ResolvedConfig]
) -> None:
    """Reuse, chunks and preemption change no token within a KV dtype; and the tokens are near those of fp32."""
    worker, info, config = quantized
    alone: dict[str, list[int]] = {}
    exact: dict[str, list[int]] = {}
    for name, prompt in prompts().items():
        alone |= generate(worker, Scheduler.from_config(config, info.layout), {name: prompt}, 1)
        exact |= generate(tiny[0], Scheduler.from_config(tiny[2], tiny[1].layout), {name: prompt}, 1)
    for depth in (1, 2):
        scheduler = Scheduler.from_config(config, info.layout)
        for _ in range(2):
            assert generate(worker, scheduler, prompts(), depth) == alone
    requests = {str(i): [(i * 31 + j) % 151 for j in range(20 + i)] for i in range(4)}
    each: dict[str, list[int]] = {}
    for name, prompt in requests.items():
        each |= generate(worker, Scheduler.from_config(config, CacheLayout.plain(16)), {name: prompt}, 1, max_tokens=40)
    scheduler = Scheduler.from_config(config, CacheLayout.plain(16))
    assert generate(worker, scheduler, requests, 2, max_tokens=40) == each
    assert scheduler.counters.num_preemptions > 0
    # One difference changes all that comes after it in a random model: the first tokens are what can be compared.
    assert sum(alone[name][0] == exact[name][0] for name in alone) >= len(alone) - 1
    bytes_per_head = {"fp8": 8, "int8": 8 + 2}[config.kv_dtype]
    assert info.kv_bytes_per_token == 3 * 2 * 2 * bytes_per_head


def test_the_info_says_what_was_allocated(tiny: tuple[Worker, WorkerInfo, ResolvedConfig]) -> None:
    _, info, config = tiny
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert info.layout.num_blocks * info.tokens_per_block >= config.max_seq_len == info.max_seq_len == 128
    assert any("KV cache" in line for line in info.ledger)


def test_all_torch_work_is_done_by_one_thread(tiny: tuple[Worker, WorkerInfo, ResolvedConfig]) -> None:
    worker, info, config = tiny
    names = set()
    runner = worker._runner
    assert runner is not None
    forward = runner._model.forward

    def noted(fwd: object) -> torch.Tensor:
        names.add((threading.current_thread().name, torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return forward(fwd)

    runner._model.forward = noted  # type: ignore[method-assign, assignment]
    generate(worker, Scheduler.from_config(config, info.layout), {"a": [1, 2]}, 2)
    runner._model.forward = forward  # type: ignore[method-assign]
    assert names == {("headrace-device", 1, True)}


def test_a_cache_that_cannot_hold_one_request_is_refused_with_the_ledger() -> None:
    config = config_of(max_seq_len=100, kv_cache_config={"tokens_per_block": 8, "max_tokens": 64})
    worker = Worker(config, ModelSource("hf", Path("tiny"), "tiny", "tiny"))
    with pytest.raises(ConfigError, match="max_seq_len"):
        worker.start(None)
    worker.shutdown()


def test_a_float32_cache_that_does_not_fit_may_be_told_to_be_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        max_seq_len=96, kv_cache_config={"tokens_per_block": 8, "free_gpu_memory_fraction": 1.0},
        max_num_tokens=4, scheduler_config={"max_prefill_tokens": 4},
    )  # fmt: skip
    groups = group_layers([KvSpec(2, 8, dtype="float32")] * 3)
    needed = 96 * groups[0].bytes_per_token
    others = MAX_COPY_BYTES * 3 + cdiv(activation_bytes(config), 4) * 4
    monkeypatch.setattr(memory, "available_memory", lambda: others + needed * 3 // 4)
    with pytest.raises(ConfigError, match=r"set kv_cache_config\.dtype to bfloat16 instead of float32"):
        memory.MemoryBook(config, torch.device("cpu"), None).share_host(groups)


def test_a_host_ledger_counts_the_copies_that_attention_keeps() -> None:
    config = config_of()
    assert workspace_bytes(config) == MAX_COPY_BYTES * config.model.num_layers


def test_the_weights_of_a_cpu_are_what_the_process_has_grown_by() -> None:
    """A model of 64 MiB, large enough that torch's own growth does not matter."""
    hf = HF | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    given = {"model": "tiny", "load_format": "dummy", "device": "cpu", "dtype": "float32", "max_batch_size": 4}
    config = resolve(LlmArgs(**given), ModelConfig.from_hf(hf), device_facts("cpu"))
    worker, info = started(config)
    worker.shutdown()
    (weights,) = [line.split() for line in info.ledger if line.startswith("- weights")]
    predicted, measured = float(weights[-2]), float(weights[-1])
    assert predicted == pytest.approx(config.model.num_params() * 4 / 2**30, abs=0.01)
    assert measured == pytest.approx(predicted, rel=0.25)
    (activations,) = [line.split() for line in info.ledger if line.startswith("- activations")]
    assert float(activations[-2]) > 0 and activations[-1] == "-"


def test_the_start_says_what_attends_and_what_was_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.worker.worker"):
        worker, info = started(config_of())
    worker.shutdown()
    (said,) = [text for text in caplog.messages if text.startswith("Attention")]
    assert said.startswith("Attention: VANILLA (TRITON: runs on cuda, not on cpu")
    assert info.attn_backend == "VANILLA"


def test_a_missing_checkpoint_is_a_clear_error_and_shutdown_still_works(tmp_path: Path) -> None:
    worker = Worker(config_of(load_format="auto"), ModelSource("hf", tmp_path, "tiny", str(tmp_path)))
    with pytest.raises(HeadraceError):
        worker.start(None)
    worker.shutdown()
    worker.shutdown()


def test_shutdown_finishes_what_was_launched() -> None:
    config = config_of()
    worker, info = started(config)
    scheduler = Scheduler.from_config(config, info.layout)
    scheduler.add_request(Request("a", [1, 2, 3], SamplingSpec(temperature=0.0, max_tokens=4)))
    plan = scheduler.schedule()
    assert plan is not None
    worker.forward(plan)
    pending = worker.sample(plan)
    worker.shutdown()
    assert len(pending.wait().token_ids) == 1
    assert not worker._queue._thread.is_alive()  # type: ignore[attr-defined]


def with_tiers(
    config: ResolvedConfig, connector: KvCacheConnectorConfig | None = None, **settings: Any
) -> ResolvedConfig:
    cache = KvCacheConfig(tokens_per_block=8, **settings)
    update = {"kv_cache_config": cache, "kv_connector_config": connector}
    return replace(config, args=config.args.model_copy(update=update))


def wait_for(
    worker: Worker, kind: str, copies: Sequence[tuple[int, int, int]], hashes: Sequence[bytes] = ()
) -> list[int]:
    """The failed copies of a transfer."""
    worker.transfer(Transfer(7, kind, [BlockCopy(*copy) for copy in copies], list(hashes)))
    until = time.monotonic() + 20
    while not (results := worker.poll_transfers()):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert [result.transfer_id for result in results] == [7]
    return results[0].failed


@torch.inference_mode()
def test_blocks_leave_a_worker_and_come_back_into_another_after_a_restart(tmp_path: Path) -> None:
    plain = config_of()
    block_bytes = 2 * 3 * 2 * 8 * 8 * 4
    config = with_tiers(plain, host_cache_size=20 * block_bytes, disk_cache_path=str(tmp_path), disk_cache_size=1 << 20)
    prompt = prompts()["long"]
    worker, info = started(config)
    assert (info.num_host_blocks, worker.num_ready_host_blocks()) == (20, 20)
    scheduler = Scheduler.from_config(config, info.layout)
    arena = worker._runner.arenas.groups[0]
    arena.zero_()
    expected = generate(worker, scheduler, {"a": prompt}, 2)["a"]
    blocks = arena.flatten(1).any(1).nonzero().flatten().tolist()
    assert len(blocks) == (len(prompt) + 12) // 8
    names = [bytes([index]) * 32 for index in range(len(blocks))]
    out = [(0, block, index) for index, block in enumerate(blocks)]
    assert wait_for(worker, "to_host", out) == []
    assert wait_for(worker, "store", [(0, -1, index) for _, _, index in out], names) == []
    kept = arena[blocks].clone()
    # All that is cached is lost and comes back from the host: the next answer is the same, out of the cache.
    arena[blocks] = torch.nan
    assert wait_for(worker, "to_device", out) == []
    assert torch.equal(arena[blocks], kept)
    assert generate(worker, scheduler, {"b": prompt}, 2)["b"] == expected
    assert int(arena.flatten(1).any(1).sum()) < len(blocks) + 5, "it was computed anew"
    worker.shutdown()
    worker.shutdown()

    again, info = started(config)
    elsewhere = [(0, info.layout.num_blocks - 1 - index, 19 - index) for index in range(len(blocks))]
    asked = [*names, bytes([99]) * 32]
    assert wait_for(again, "lookup", [(0, -1, -1)] * len(asked), asked) == [len(blocks)]
    assert wait_for(again, "fetch", [(0, -1, host) for _, _, host in elsewhere], names) == []
    assert wait_for(again, "to_device", elsewhere) == []
    assert torch.equal(again._runner.arenas.groups[0][[block for _, block, _ in elsewhere]], kept)
    again.shutdown()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"host_cache_size": 1 << 50}, "host_cache_size = 1125899906842624 .* is more than this host has to give"),
        ({"host_cache_size": 5}, "host_cache_size = 5 holds no block: one of this model takes 3072 bytes"),
        (
            {"host_cache_size": 1 << 20, "disk_cache_size": 9, "disk_cache_path": "here"},
            "disk_cache_size = 9 holds no block: one of this model takes 3072 bytes",
        ),
        (
            {"host_cache_size": 1 << 20, "disk_cache_size": 1 << 20, "disk_cache_path": "/dev/null/kv"},
            "disk_cache_path = /dev/null/kv cannot be written to .Not a directory.",
        ),
        (
            {"host_cache_size": 1 << 20, "disk_cache_size": 1 << 60, "disk_cache_path": "here"},
            "disk_cache_path = here is on a disk of [0-9]+ bytes, and 1152921504606846976 were asked for",
        ),
    ],
)
def test_a_tier_that_cannot_be_is_refused_in_one_sentence(
    settings: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        started(with_tiers(config_of(), **settings))


def test_two_engines_share_a_folder_and_each_keeps_a_disk_of_its_own(tmp_path: Path) -> None:
    shared = KvCacheConnectorConfig(connector="folder", path=str(tmp_path / "shared"), max_bytes=1 << 20)
    workers = [
        started(
            with_tiers(
                config_of(), shared, host_cache_size=1 << 20, disk_cache_path=str(tmp_path / own),
                disk_cache_size=1 << 20,
            )
        )[0]
        for own in ("a", "b")
    ]  # fmt: skip
    name = [b"n" * 32]
    assert wait_for(workers[0], "to_host", [(0, 1, 0)]) == []
    assert wait_for(workers[0], "store", [(0, -1, 0)], name) == []
    assert all(list((tmp_path / own).rglob("*.kv")) for own in ("a", "shared")) and not list(
        (tmp_path / "b").rglob("*.kv")
    )
    assert wait_for(workers[1], "lookup", [(0, -1, -1)], name) == []
    assert wait_for(workers[1], "fetch", [(0, -1, 5)], name) == []
    assert wait_for(workers[1], "to_device", [(0, 4, 5)]) == []
    arenas = [worker._runner.arenas.groups[0] for worker in workers]
    assert torch.equal(arenas[0][1], arenas[1][4])
    for worker in workers:
        worker.shutdown()


def test_a_connector_of_ones_own_is_found_by_name(tmp_path: Path) -> None:
    def own(module: str, name: str) -> ResolvedConfig:
        connector = KvCacheConnectorConfig(connector_module=module, connector_worker_class=name)
        return with_tiers(config_of(), connector, host_cache_size=1 << 20)

    worker, _ = started(own("transfers", "NamedStore"))
    assert wait_for(worker, "to_host", [(0, 1, 0)]) == []
    assert wait_for(worker, "store", [(0, -1, 0)], [b"n" * 32]) == []
    assert NamedStore.last is not None and list(NamedStore.last.blocks) == [BlockKey(b"n" * 32, 0)]
    assert len(NamedStore.last.name) == 32
    worker.shutdown()
    assert NamedStore.last.is_closed
    for module, name, reason in (
        ("no_such_module", "C", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("transfers", "NoSuchClass", "there is no 'NoSuchClass'"),
        ("transfers", "done", "TypeError"),
    ):
        with pytest.raises(ConfigError, match=rf"connector_worker_class: {module}:{name} could not be made \({reason}"):
            started(own(module, name))


def test_a_worker_without_tiers_has_nothing_to_tell(tiny: tuple[Worker, WorkerInfo, ResolvedConfig]) -> None:
    worker, info, _ = tiny
    assert (info.num_host_blocks, worker.num_ready_host_blocks(), worker.poll_transfers()) == (0, 0, [])
