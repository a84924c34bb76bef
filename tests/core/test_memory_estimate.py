# SPDX-License-Identifier: Apache-2.0
"""What is predicted of a start, against what such starts were measured to take."""

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import DeviceFacts, ResolvedConfig, resolve
from headrace.core.ledger import GIB
from headrace.core.memory_estimate import (
    activation_bytes,
    estimate_needs,
    graph_bytes,
    weight_bytes,
    workspace_bytes,
)

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 1e6, "attention_bias": False,
}  # fmt: skip
H200 = DeviceFacts("cuda", "NVIDIA H200", int(139.8 * GIB), (9, 0))


def config_of(hf: dict = QWEN3_8B, device: DeviceFacts = H200, **settings: object) -> ResolvedConfig:
    return resolve(LlmArgs(model="x", **settings), ModelConfig.from_hf(hf), device)


def test_an_8b_model_on_an_h200_is_predicted_within_five_percent() -> None:
    """benchmarks/results/h200/bench_throughput.json: the ledger of that start, less the 0.5 GiB then set aside."""
    config = config_of(max_seq_len=16384)
    assert weight_bytes(config) == pytest.approx(15.27 * GIB, rel=0.005)
    assert activation_bytes(config) == pytest.approx(0.78 * GIB, rel=0.05)
    assert workspace_bytes(config) == pytest.approx(0.10 * GIB, rel=0.05)
    # "all 87 of an 8B model take 0.27 GiB".
    assert graph_bytes(config) == pytest.approx(0.27 * GIB, rel=0.1)


def test_graphs_are_counted_only_where_they_are_captured() -> None:
    assert graph_bytes(config_of(cuda_graph_config=None)) == 0
    few = config_of(cuda_graph_config={"batch_sizes": [1, 2], "mixed_num_tokens": []})
    assert 0 < graph_bytes(few) < graph_bytes(config_of()) / 4
    cpu = config_of(device=DeviceFacts("cpu", total_memory=64 * GIB))
    assert graph_bytes(cpu) == 0


def test_a_large_batch_does_not_let_the_sampler_outgrow_the_model() -> None:
    """Before rows were sampled in pieces a batch of 2,048 took 4.4 GiB of fp32 logits at its peak."""
    usual, large = (activation_bytes(config_of(max_batch_size=n)) for n in (256, 2048))
    logits = 2048 * 151936 * 2
    assert large - usual < logits + 256 * 2**20 < GIB


def test_what_weights_take_follows_the_config() -> None:
    config = config_of()
    half = weight_bytes(config, packed_bytes=4 * GIB)
    assert half < 4.1 * GIB < weight_bytes(config)
    wide = weight_bytes(config_of(dtype="float32"))
    assert wide == pytest.approx(2 * weight_bytes(config), rel=0.01)
    biased = weight_bytes(config_of(QWEN3_8B | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))
    assert biased - weight_bytes(config) == 36 * (4096 + 2 * 1024) * 2


def test_the_needs_of_a_start_that_has_not_happened_hold_every_part() -> None:
    config = config_of(max_num_tokens=4096)
    needs = estimate_needs(config, H200.total_memory, other_bytes=7, device="NVIDIA H200")
    assert needs.weight_bytes == weight_bytes(config) and needs.graph_bytes == graph_bytes(config)
    assert needs.fixed_bytes == workspace_bytes(config) and needs.other_bytes == 7
    assert 0 <= needs.activation_bytes_per_token * 4096 - activation_bytes(config) < 4096
    assert needs.kv_bytes_per_block == 36 * 2 * 8 * 128 * 2 * config.tokens_per_block
