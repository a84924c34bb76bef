# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from headrace.config.model import ModelConfig
from headrace.errors import ConfigError, ModelLoadError
from headrace.quantization import choose
from headrace.quantization.choose import make_quant_method, require_room
from headrace.quantization.fixed_rows import FixedRows
from headrace.quantization.int4_cpu import CpuMethod
from headrace.quantization.none import FixedTileMethod, PlainMethod

LAYER = "model.layers.0.mlp.down_proj"
BF16 = torch.bfloat16


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 80, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256, **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "device", "kind", "bf16", "method"),
    [
        (BF16, "cpu", "gguf", True, CpuMethod),
        (BF16, "cpu", "gguf", False, CpuMethod),
        (BF16, "cpu", "hf", True, CpuMethod),
        (BF16, "cpu", "hf", False, PlainMethod),
        (torch.float32, "cpu", "gguf", True, PlainMethod),
        (torch.float16, "cpu", "hf", True, PlainMethod),
        (BF16, "cuda", "gguf", True, PlainMethod),
    ],
)
def test_the_method_follows_dtype_device_and_source(
    dtype: torch.dtype, device: str, kind: str, bf16: bool, method: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_fast_bf16", lambda: bf16)
    assert type(make_quant_method(LAYER, config(), dtype, device, kind)) is method


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_embedding_multiplies(tied: bool) -> None:
    cfg = config(tie_word_embeddings=tied)
    embedding = make_quant_method("model.embed_tokens", cfg, BF16, "cpu", "gguf")
    assert isinstance(embedding, CpuMethod)
    assert embedding.embeds and embedding.multiplies == tied
    layer = make_quant_method(LAYER, cfg, BF16, "cpu", "gguf")
    assert isinstance(layer, CpuMethod)
    assert layer.multiplies and not layer.embeds


def test_without_memory_for_a_copy_none_is_kept() -> None:
    cfg = config()
    for free, keeps in ((None, True), (cfg.num_params() * 100, True), (cfg.num_params() * 3, False)):
        method = make_quant_method(LAYER, cfg, BF16, "cpu", "gguf", free)
        assert isinstance(method, CpuMethod) and method.keeps_wide == keeps


def test_a_quantization_that_is_not_built_is_refused_by_name() -> None:
    cfg = config(quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelLoadError, match="awq"):
        make_quant_method(LAYER, cfg, BF16, "cpu", "hf")
    assert make_quant_method(LAYER, config(quantization_config={"quant_method": "gguf"}), BF16, "cuda", "gguf")


def test_deterministic_chooses_the_same_whatever_memory_is_free() -> None:
    for dtype, kind in ((BF16, "gguf"), (BF16, "hf"), (torch.float32, "hf")):
        for free in (None, 1, 1 << 40):
            assert type(make_quant_method(LAYER, config(), dtype, "cpu", kind, free, deterministic=True)) is FixedRows
    assert type(make_quant_method(LAYER, config(), BF16, "cuda", "hf", deterministic=True)) is FixedTileMethod


def test_deterministic_needs_room_for_packed_weights_in_bf16() -> None:
    cfg = config()
    require_room(cfg, 0)
    require_room(cfg, 2 * cfg.num_params())
    with pytest.raises(ConfigError, match="deterministic = true keeps packed weights in bf16"):
        require_room(cfg, 2 * cfg.num_params() - 1)
