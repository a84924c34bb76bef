# SPDX-License-Identifier: Apache-2.0
"""A model of sliding and full layers keeps only windows of the former, and gives the tokens of one that keeps all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_worker import generate

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.scheduler import Scheduler
from headrace.utils.hub import ModelSource
from headrace.worker.device import device_facts
from headrace.worker.worker import Worker, WorkerInfo

WINDOW = 12
HF = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 151, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.3, "torch_dtype": "float32", "rope_theta": 10000.0, "rope_local_base_freq": 1000.0,
    "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip

Tiny = tuple[Worker, WorkerInfo, ResolvedConfig]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    args = LlmArgs(
        model="tiny",
        load_format="dummy",
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_batch_size=4,
        max_num_tokens=24,
        kv_cache_config={"tokens_per_block": 8},
        scheduler_config={"max_prefill_tokens": 8},
        seed=3,
    )
    config = resolve(args, ModelConfig.from_hf(HF), device_facts("cpu"))
    worker = Worker(config, ModelSource("hf", Path("tiny"), "tiny", "tiny"))
    yield worker, worker.start(None), config
    worker.shutdown()


def prompts() -> dict[str, list[int]]:
    shared = [(i * 37 + 5) % 151 for i in range(90)]
    return {
        "short": [7], "long": shared, "cached": [*shared[:61], 3, 4], "other": [(i * 11) % 151 for i in range(70)],
        "edge": shared[:16], "parts early": [*shared[:20], 9, 8],
    }  # fmt: skip


def without_windows(layout: CacheLayout) -> CacheLayout:
    return replace(layout, groups=tuple(replace(group, window=None) for group in layout.groups))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[int]]:
    """What each gives alone, in a cache that keeps everything."""
    worker, info, config = tiny
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts().items():
        scheduler = Scheduler.from_config(config, without_windows(info.layout))
        tokens |= generate(worker, scheduler, {name: prompt}, 1, max_tokens=40)
    assert len({tuple(each) for each in tokens.values()}) == len(tokens)
    return tokens


def test_sliding_layers_have_slabs_and_a_window_of_their_own(tiny: Tiny) -> None:
    _, info, _ = tiny
    assert [group.window for group in info.layout.groups] == [WINDOW, None]
    sliding, full = info.layout.groups
    assert (sliding.blocks_per_slab, full.blocks_per_slab) == (1, 3)
    assert any("with a window" in line for line in info.ledger)


@pytest.mark.parametrize("depth", [1, 2])
def test_windows_change_no_token_and_neither_does_what_is_found_in_them(
    tiny: Tiny, expected: dict[str, list[int]], depth: int
) -> None:
    worker, info, config = tiny
    scheduler = Scheduler.from_config(config, info.layout)
    for _ in range(2):
        assert generate(worker, scheduler, prompts(), depth, max_tokens=40) == expected
        scheduler.check_invariants()
    assert scheduler.counters.num_prefix_hit_tokens > 0


def test_blocks_that_left_a_window_are_given_to_others_and_change_no_token(
    tiny: Tiny, expected: dict[str, list[int]]
) -> None:
    worker, info, config = tiny
    # Room for the longest alone: everything is evicted, preempted and handed on all the time.
    layout = replace(info.layout, num_slabs=16)
    config = replace(config, max_seq_len=130)
    scheduler = Scheduler.from_config(config, layout)
    for _ in range(2):
        assert generate(worker, scheduler, prompts(), 2, max_tokens=40) == expected
        scheduler.check_invariants()
    assert scheduler.counters.num_preemptions > 0


def test_a_long_sequence_takes_windows_of_its_sliding_layers_only(tiny: Tiny) -> None:
    worker, info, config = tiny
    scheduler = Scheduler.from_config(config, info.layout)
    generate(worker, scheduler, {"a": [(i * 7) % 151 for i in range(200)]}, 1, max_tokens=1)
    assert scheduler.stats().num_used_blocks == 0
    most = 0
    prompt = [(i * 5) % 151 for i in range(200)]
    scheduler = Scheduler.from_config(config, info.layout)
    take = scheduler.cache.pool.take

    def watch(index: int, count: int) -> list[int]:
        nonlocal most
        taken = take(index, count)
        if index == 0:
            most = max(most, scheduler.cache.pool.groups[0].num_used)
        return taken

    scheduler.cache.pool.take = watch  # type: ignore[method-assign]
    generate(worker, scheduler, {"b": prompt}, 1, max_tokens=20)
    # 28 blocks long; a window of 12 and chunks of 24 are 36 tokens, 5 blocks and one begun at either end.
    assert 2 <= most <= 7
