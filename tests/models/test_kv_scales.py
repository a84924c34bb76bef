# SPDX-License-Identifier: Apache-2.0
"""The scales of an fp8 KV cache: under every name that checkpoints use, for the layers they name."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import random_weights

from headrace.attention.choose import choose_backend
from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import DeviceFacts, resolve
from headrace.errors import ModelLoadError
from headrace.layers.build import BuildContext
from headrace.models.base import CausalLM
from headrace.models.registry import build_model
from headrace.models.weights import load_model_weights, open_checkpoint
from headrace.quantization.none import PlainMethod
from headrace.utils.hub import resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = "model.layers.1.self_attn"


def load(folder: Path, extra: dict[str, torch.Tensor], kv_dtype: torch.dtype = torch.float8_e4m3fn) -> CausalLM:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights() | extra, folder / "model.safetensors")
    source = resolve_model(str(folder))
    ctx = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        quant=lambda prefix: PlainMethod(),
        backend=lambda need: choose_backend(need, "cpu"),
        kv_dtype=kv_dtype,
        max_positions=64,
    )
    model = build_model(load_model_config(source), ctx)
    load_model_weights(model, open_checkpoint(source, "auto"))
    return model


def scales(model: CausalLM, layer: int) -> list[list[float]]:
    found = model.model.layers[layer].self_attn.kv_scale
    return [[round(value, 4) for value in row] for row in found.tolist()]


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("k_proj.k_scale", "v_proj.v_scale"), ()),
        (("k_scale", "v_scale"), (1,)),
        (("attn.k_scale", "attn.v_scale"), ()),
        (("k_proj.output_scale", "v_proj.output_scale"), (1,)),
    ],
)
def test_scales_load_under_their_names(
    tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    given = {f"{LAYER}.{name}": torch.full(shape, value) for name, value in zip(names, (0.02, 0.5), strict=True)}
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, given)
    assert scales(model, 1) == [[0.02, 0.02], [0.5, 0.5]]
    assert scales(model, 0) == [[1.0, 1.0], [1.0, 1.0]]
    assert "2 of 4 KV scales" in caplog.text


@pytest.mark.parametrize("name", ["kv_scale", "kv_cache_scale"])
def test_one_scale_may_be_for_both(tmp_path: Path, name: str) -> None:
    assert scales(load(tmp_path, {f"{LAYER}.{name}": torch.tensor([0.25])}), 1) == [[0.25, 0.25]] * 2


def test_a_scale_may_be_per_head(tmp_path: Path) -> None:
    given = {f"{LAYER}.k_scale": torch.tensor([0.25, 0.5]).view(2, 1, 1), f"{LAYER}.q_scale": torch.tensor(3.0)}
    assert scales(load(tmp_path, given), 1) == [[0.25, 0.5], [1.0, 1.0]]


def test_no_scales_are_one_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, {})
    assert scales(model, 0) == [[1.0, 1.0], [1.0, 1.0]]
    assert sum("no KV scales" in record.getMessage() for record in caplog.records) == 1


def test_another_cache_has_no_use_for_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, {f"{LAYER}.k_scale": torch.tensor(0.5)}, torch.bfloat16)
    assert model.model.layers[1].self_attn.kv_scale is None
    assert "KV scales" not in caplog.text


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({f"{LAYER}.k_scale": torch.ones(3)}, r"shape \[3\]; a KV scale is one number, or one for each of 2 heads"),
        ({f"{LAYER}.k_scale": torch.tensor(0.0)}, "a KV scale is a number above 0"),
        ({f"{LAYER}.v_scale": torch.tensor(torch.nan)}, "a KV scale is a number above 0"),
        ({f"{LAYER}.k_scale": torch.ones(1), f"{LAYER}.kv_scale": torch.ones(1)}, "under another name too"),
        ({f"{LAYER}.r_scale": torch.ones(1)}, "does not know"),
        ({"model.layers.7.self_attn.k_scale": torch.ones(1)}, "does not know"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(tmp_path: Path, extra: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load(tmp_path, extra)


KV_ONLY = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "modelopt", "wanted"),
    [
        (None, None, "bfloat16"),
        (None, {"quantization": KV_ONLY}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": FP8_SCHEME}, None, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8_SCHEME}, None, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None, "int8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None, "bfloat16"),
    ],
)
def test_auto_follows_the_checkpoint(
    tmp_path: Path, quantization: dict[str, object] | None, modelopt: dict[str, object] | None, wanted: str
) -> None:
    """And such a checkpoint, where its weights are plain, counts as unquantized."""
    config = CONFIG if quantization is None else CONFIG | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    model = load_model_config(resolve_model(str(tmp_path), need_weights=False))
    gpu = DeviceFacts("cuda", "a GPU", 80 << 30, (8, 0), 8)
    resolved = resolve(LlmArgs(model="m"), model, gpu)
    assert resolved.kv_dtype == wanted
    if wanted != "bfloat16":
        assert model.quantization is None
        assert resolved.origin["kv_cache_config.dtype"] == "auto: the checkpoint's"
        explicit = resolve(LlmArgs(model="m", kv_cache_config={"dtype": "float16"}), model, gpu)
        assert explicit.kv_dtype == "float16"


def test_a_kv_format_that_is_not_built_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "NVFP4"}}))
    model = load_model_config(resolve_model(str(tmp_path), need_weights=False))
    resolved = resolve(LlmArgs(model="m"), model, DeviceFacts("cuda", "a GPU", 80 << 30, (9, 0), 8))
    assert resolved.kv_dtype == "bfloat16"
    assert any("KV cache of nvfp4, which is not built" in note for note in resolved.notes)
