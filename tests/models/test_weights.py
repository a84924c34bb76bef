# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import random_weights, write_gguf
from torch import Tensor

from headrace.attention.choose import choose_backend
from headrace.config.checkpoint import load_model_config
from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.layers.build import BuildContext
from headrace.models.base import CausalLM
from headrace.models.registry import build_model
from headrace.models.weights import DummyStream, SafetensorsStream, load_model_weights, open_checkpoint, read_header
from headrace.quantization.base import QuantMethod
from headrace.quantization.int4_cpu import CpuMethod
from headrace.quantization.none import PlainMethod
from headrace.utils.hub import INDEX, ModelSource, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path, weights: dict[str, Tensor], num_shards: int = 1, tied: bool = True) -> ModelSource:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    names = list(weights)
    place = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for file in set(place.values()):
        save_file({n: weights[n].contiguous() for n in names if place[n] == file}, folder / file)
    if num_shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": place}))
    return resolve_model(str(folder))


def build(
    cfg: ModelConfig, quant: Callable[[], QuantMethod] | None = None, dtype: torch.dtype = torch.float32
) -> CausalLM:
    ctx = BuildContext(
        dtype=dtype,
        device=torch.device("cpu"),
        quant=lambda prefix: quant() if quant else PlainMethod(),
        backend=lambda need: choose_backend(need, "cpu"),
        kv_dtype=torch.float32,
        max_positions=64,
    )
    return build_model(cfg, ctx)


def load(source: ModelSource, model: CausalLM | None = None) -> CausalLM:
    cfg = load_model_config(source)
    model = model or build(cfg)
    load_model_weights(model, open_checkpoint(source, "auto"))
    return model


def refusal(source: ModelSource) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(source)
    return str(error.value)


def assert_holds(model: CausalLM, weights: dict[str, Tensor]) -> None:
    layer = model.model.layers[1]
    prefix = "model.layers.1."
    qkv = torch.cat([weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    gate_up = torch.cat([weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(layer.self_attn.qkv_proj.weight, qkv)
    assert torch.equal(layer.mlp.gate_up_proj.weight, gate_up)
    assert torch.equal(layer.mlp.down_proj.weight, weights[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(layer.post_attention_layernorm.weight, weights[f"{prefix}post_attention_layernorm.weight"])
    assert torch.equal(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_weight_arrives_in_its_place(tmp_path: Path, num_shards: int) -> None:
    weights = random_weights()
    assert_holds(load(write_checkpoint(tmp_path, weights, num_shards)), weights)


def test_an_untied_head_is_its_own(tmp_path: Path) -> None:
    weights = random_weights(tied=False)
    model = load(write_checkpoint(tmp_path, weights, tied=False))
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_tied_head_that_is_stored_and_rope_constants_are_passed_over(tmp_path: Path) -> None:
    weights = random_weights()
    more = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert_holds(load(write_checkpoint(tmp_path, weights | more)), weights)


def test_loading_again_overwrites_the_same_storage(tmp_path: Path) -> None:
    weights = random_weights()
    source = write_checkpoint(tmp_path, {name: torch.zeros_like(w) for name, w in weights.items()})
    model = load(source)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load(write_checkpoint(tmp_path, weights), model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert_holds(model, weights)


def test_progress_counts_the_checkpoints_bytes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, random_weights())
    cfg = load_model_config(source)
    stream = open_checkpoint(source, "auto")
    seen: list[tuple[int, int]] = []
    load_model_weights(build(cfg), stream, lambda label, done, total: seen.append((done, total)))
    assert seen[-1] == (stream.total_bytes, stream.total_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_missing_weight_is_named_as_the_checkpoint_would(tmp_path: Path) -> None:
    weights = random_weights()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    del weights["model.layers.0.mlp.up_proj.weight"]
    message = refusal(write_checkpoint(tmp_path, weights))
    assert "lacks 2 tensors" in message
    assert "model.layers.1.self_attn.k_proj.weight" in message
    assert "model.layers.0.mlp.up_proj.weight" in message


def test_an_unexpected_weight_is_named_with_its_file(tmp_path: Path) -> None:
    weights = random_weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    message = refusal(write_checkpoint(tmp_path, weights))
    assert "has 1 tensor: model.layers.0.self_attn.q_proj.bias" in message
    assert "model-0.safetensors" in message


def test_a_layer_too_many_is_unexpected(tmp_path: Path) -> None:
    weights = random_weights() | {"model.layers.2.input_layernorm.weight": torch.zeros(64)}
    assert "model.layers.2.input_layernorm.weight" in refusal(write_checkpoint(tmp_path, weights))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_a_wrong_shape_names_file_tensor_and_both_shapes(tmp_path: Path, name: str) -> None:
    weights = random_weights()
    weights[name] = torch.zeros(30, 64)
    message = refusal(write_checkpoint(tmp_path, weights))
    assert "model-0.safetensors" in message and name in message and "[30, 64]" in message
    assert str(list(random_weights()[name].shape)) in message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    weights = random_weights()
    source = write_checkpoint(tmp_path, weights)
    save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / "more.safetensors")
    assert "model.norm.weight is in both" in refusal(source)


def test_a_tensor_that_comes_fused_and_in_parts_is_refused(tmp_path: Path) -> None:
    weights = random_weights()
    weights["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(128, 64)
    assert "comes twice" in refusal(write_checkpoint(tmp_path, weights))


def test_a_truncated_file_names_itself_and_the_first_tensor_cut(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, random_weights())
    file = tmp_path / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-50_000])
    message = refusal(source)
    assert "model-0.safetensors is truncated" in message and "tensor model." in message


@pytest.mark.parametrize(
    "content", [b"", b"\x10", b"\xff" * 100, (1000).to_bytes(8, "little") + b"{", b"\x02" + bytes(7) + b"[]"]
)
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        read_header(file)


def resident_kib(file: str) -> int:
    """KiB of a mapped file that lie in this process's memory."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_ours = line.endswith(file)
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_file_is_never_resident_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.models.weights.RUN_BYTES", 2 << 20)
    file = tmp_path / "m.safetensors"
    save_file({f"t{i}": torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(8)}, file)
    seen = []
    for name, tensor in SafetensorsStream([file]):
        seen.append((name, int(tensor.max())))
        del tensor
        assert resident_kib("m.safetensors") < 3 << 10
    assert seen == [(f"t{i}", i) for i in range(8)]
    assert resident_kib("m.safetensors") == 0


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_gguf_file_loads_like_the_folder_it_was_made_from(tmp_path: Path, kind: str) -> None:
    weights = random_weights()
    source = resolve_model(str(write_gguf(tmp_path / "t.gguf", weights, kind=kind)))
    model = load(source)
    if kind == "F32":
        assert_holds(model, weights)
    qkv = torch.cat([weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert (model.model.layers[1].self_attn.qkv_proj.weight - qkv).abs().mean() < 0.03


def test_a_gguf_file_with_a_tensor_left_out_is_refused(tmp_path: Path) -> None:
    weights = random_weights()
    del weights["model.layers.0.mlp.down_proj.weight"]
    assert "model.layers.0.mlp.down_proj.weight" in refusal(
        resolve_model(str(write_gguf(tmp_path / "t.gguf", weights)))
    )


def test_packed_weights_load_again_without_new_storage(tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "t.gguf", random_weights(), kind="Q4_1")))
    other = {name: w.flip(0) for name, w in random_weights().items()}
    changed = resolve_model(str(write_gguf(tmp_path / "u.gguf", other, kind="Q4_1")))
    cfg = load_model_config(source)
    model, fresh = (build(cfg, lambda: CpuMethod(embeds=True, is_bf16=False), torch.bfloat16) for _ in range(2))
    for layers, path in ((model, source), (model, changed), (fresh, changed)):
        load_model_weights(layers, open_checkpoint(path, "auto"))
    x = torch.randn(3, 64).bfloat16()
    one, two = (m.model.layers[0].mlp.gate_up_proj for m in (model, fresh))
    assert torch.equal(one(x), two(x))


class TestDummy:
    @pytest.fixture
    def cfg(self, tmp_path: Path) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        return load_model_config(resolve_model(str(tmp_path), need_weights=False))

    def make(self, cfg: ModelConfig) -> CausalLM:
        model = build(cfg)
        load_model_weights(model, DummyStream())
        return model

    def test_random_weights_need_a_config_only_and_are_always_the_same(self, cfg: ModelConfig) -> None:
        one, two = self.make(cfg).state_dict(), self.make(cfg).state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_they_depend_on_the_name_and_not_on_the_fusion(self, cfg: ModelConfig) -> None:
        deeper = self.make(replace(cfg, num_layers=3, layer_windows=(None,) * 3, layer_uses_rope=(True,) * 3))
        model = self.make(cfg)
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, deeper.state_dict()[name]), name
        layers = model.model.layers
        assert not torch.equal(layers[0].mlp.down_proj.weight, layers[1].mlp.down_proj.weight)

    def test_their_scale_keeps_activations_near_one(self, cfg: ModelConfig) -> None:
        layer = self.make(cfg).model.layers[0]
        x = torch.randn(200, 64)
        assert 0.8 < layer.mlp.gate_up_proj(x).std() < 1.2
        assert torch.equal(layer.input_layernorm.weight, torch.ones(64))
