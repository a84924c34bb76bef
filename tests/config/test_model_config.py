# SPDX-License-Identifier: Apache-2.0
"""Checkpoint json in every spelling that Transformers 4 and 5 write gives the same facts."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.config.checkpoint import load_model_config, read_json
from headrace.config.model import ModelConfig
from headrace.config.rope import RopeConfig
from headrace.errors import ModelLoadError
from headrace.utils.hub import ModelSource

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA: dict[str, Any] = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def v5(cls: str, **changes: Any) -> ModelConfig:
    """What is read from the json that the installed Transformers writes."""
    return ModelConfig.from_hf(getattr(transformers, cls)(**{**TINY, **changes}).to_dict())


@pytest.mark.parametrize(
    ("cls", "architecture"),
    [
        ("LlamaConfig", "LlamaForCausalLM"),
        ("MistralConfig", "MistralForCausalLM"),
        ("Qwen2Config", "Qwen2ForCausalLM"),
        ("Qwen3Config", "Qwen3ForCausalLM"),
        ("SmolLM3Config", "SmolLM3ForCausalLM"),
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        ("Phi3Config", "Phi3ForCausalLM"),
    ],
)
def test_every_family_is_read_as_transformers_holds_it(cls: str, architecture: str) -> None:
    theirs = getattr(transformers, cls)(**TINY, pad_token_id=0)
    ours = ModelConfig.from_hf(theirs.to_dict())
    head_dim = getattr(theirs, "head_dim", None) or 16
    assert ours.architecture == architecture
    assert (ours.num_layers, ours.num_q_heads, ours.num_kv_heads, ours.head_dim) == (4, 4, 2, head_dim)
    assert (ours.hidden_size, ours.intermediate_size, ours.vocab_size) == (64, 96, 128)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert len(ours.layer_windows) == len(ours.layer_uses_rope) == 4


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_value_left_out_of_the_json_is_what_transformers_takes_it_for(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(
        name, **{k: v for k, v in TINY.items() if k != "max_position_embeddings"}
    )
    ours = ModelConfig.from_hf(
        {**{k: v for k, v in TINY.items() if k != "max_position_embeddings"}, "model_type": name}
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings or name in ("qwen2", "qwen3", "smollm3")
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps


SCALINGS: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeConfig(kind="linear", factor=4.0)),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=256),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=64),
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 24,
            "truncate": False,
        },
        RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=24.0, truncate=False),
    ),
    "longrope": (
        {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
        RopeConfig(
            kind="longrope",
            factor=4.0,
            original_max_position_embeddings=64,
            short_factor=(1.0,) * 8,
            long_factor=(2.0,) * 8,
        ),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_rope_scaling_is_the_same_in_both_spellings(kind: str) -> None:
    scaling, expected = SCALINGS[kind]
    v4_type = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    expected = RopeConfig(**{**expected.__dict__, "theta": 5000.0})
    for spelled in (
        {"rope_theta": 5000.0, "rope_scaling": scaling},
        {"rope_theta": 5000.0, "rope_scaling": v4_type},
        {"rope_parameters": {**scaling, "rope_theta": 5000.0}},
    ):
        assert ModelConfig.from_hf({**LLAMA, **spelled}).rope == expected
    assert v5("LlamaConfig", rope_parameters={**scaling, "rope_theta": 5000.0}).rope == expected


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="'spiral' is not supported; supported are default, linear"):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}})
    with pytest.raises(ModelLoadError, match="'linear' has no factor"):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "linear"}})


def test_the_trained_length_beside_the_scaling_wins() -> None:
    phi3 = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 32}
    for spelled in ("su", "yarn", "longrope"):
        rope = ModelConfig.from_hf({**phi3, "rope_scaling": {"type": spelled, **LONG}}).rope
        assert (rope.kind, rope.original_max_position_embeddings, rope.factor) == ("longrope", 32, 8.0)


def test_part_of_a_head_is_rotated() -> None:
    assert v5("Phi3Config", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}).rope.rotary_dim(16) == 8
    assert ModelConfig.from_hf({**LLAMA, "partial_rotary_factor": 0.75}).rope.rotary_dim(16) == 12


def test_how_long_a_sequence_may_be_follows_the_scaling() -> None:
    yarn = ModelConfig.from_hf(
        {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    )
    assert (yarn.max_model_len, yarn.longest_allowed) == (1024, 1024)
    linear = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (linear.max_model_len, linear.longest_allowed) == (256, 1024)
    assert ModelConfig.from_hf(LLAMA).longest_allowed == 256


GEMMA4 = {
    **TINY,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
}


def test_gemma_3_is_the_same_in_both_spellings() -> None:
    old = ModelConfig.from_hf(GEMMA4)
    changes = {k: v for k, v in GEMMA4.items() if k not in ("architectures", "model_type")}
    new = ModelConfig.from_hf(transformers.Gemma3TextConfig(**changes).to_dict())
    assert old.layer_windows == new.layer_windows == (16, 16, None, 16, 16, None, 16)
    assert old.rope == new.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert old.rope_local == new.rope_local == RopeConfig(theta=1e4)
    assert old.attention_scale == 1 / 8
    assert old.embedding_multiplier == 8.0
    assert (old.hidden_act, old.final_logit_softcap, old.attn_softcap) == ("gelu_pytorch_tanh", 30.0, None)
    assert old.tie_word_embeddings


def test_a_nested_text_model_is_read_through() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "model_type": "gemma3_text"}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    cfg = ModelConfig.from_hf(
        {**outer, "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"hidden_size": 9}}
    )
    assert cfg.architecture == "Gemma3ForConditionalGeneration"
    assert (cfg.hidden_size, cfg.num_q_heads, cfg.head_dim, cfg.vocab_size) == (64, 8, 256, 262208)
    assert cfg.eos_token_ids == (1, 106)
    assert cfg.torch_dtype == "bfloat16"


def test_mistral_windows_every_layer_and_null_means_none() -> None:
    mistral = {**TINY, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert ModelConfig.from_hf({**mistral, "sliding_window": 32}).layer_windows == (32,) * 4
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).layer_windows == (None,) * 4
    assert ModelConfig.from_hf(mistral).layer_windows == (4096,) * 4
    assert v5("MistralConfig", sliding_window=32).layer_windows == (32,) * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_has_a_window_only_when_switched_on(model_type: str) -> None:
    qwen = {**TINY, "architectures": ["x"], "model_type": model_type, "sliding_window": 32, "max_window_layers": 3}
    assert ModelConfig.from_hf(qwen).layer_windows == (None,) * 4
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True}).layer_windows == (None, None, None, 32)
    new = v5(f"{model_type.capitalize()}Config", sliding_window=32, max_window_layers=3, use_sliding_window=True)
    assert new.layer_windows == (None, None, None, 32)


def test_biases() -> None:
    def biases(cls: str, **changes: Any) -> tuple[bool, bool, bool]:
        cfg = v5(cls, **changes)
        return cfg.attention_bias, cfg.attention_out_bias, cfg.mlp_bias

    assert biases("Qwen2Config") == (True, False, False)
    assert biases("Qwen3Config") == (False, False, False)
    assert biases("Qwen3Config", attention_bias=True) == (True, True, False)
    assert biases("LlamaConfig", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("MistralConfig") == (False, False, False)


def test_smollm3_leaves_rotary_positions_out_of_every_fourth_layer() -> None:
    assert v5("SmolLM3Config").layer_uses_rope == (True, True, True, False)
    old = {**TINY, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    assert ModelConfig.from_hf(old).layer_uses_rope == (True, True, True, False)
    assert ModelConfig.from_hf({**old, "no_rope_layers": [1, 0, 1, 0]}).layer_uses_rope == (True, False, True, False)
    with pytest.raises(ModelLoadError, match="3 no_rope_layers for 4 layers"):
        ModelConfig.from_hf({**old, "no_rope_layers": [1, 0, 1]})


def test_every_end_token_counts_once() -> None:
    cfg = ModelConfig.from_hf({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert cfg.eos_token_ids == (7, 2, 9)
    assert ModelConfig.from_hf(LLAMA).eos_token_ids == ()


def test_what_has_no_field_is_kept() -> None:
    cfg = ModelConfig.from_hf({**LLAMA, "embd_pdrop": 0.5, "quantization_config": {"quant_method": "fp8"}})
    assert cfg.extra["embd_pdrop"] == 0.5
    assert cfg.quantization == {"quant_method": "fp8"}
    assert hash(cfg.rope) == hash(RopeConfig())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "4 attention heads, which 3 key-value heads do not divide"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"use_bidirectional_attention": True}, "cannot generate"),
        ({"architectures": None, "model_type": "new"}, "names no architecture"),
    ],
)
def test_impossible_json_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_a_model_of_another_kind_is_told_so() -> None:
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel is not a language model of a kind that Headrace reads"):
        ModelConfig.from_hf({"architectures": ["GPT2LMHeadModel"], "n_head": 4, "n_embd": 64})


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    cfg = load_model_config(ModelSource("hf", tmp_path, "tiny", str(tmp_path)))
    assert cfg.eos_token_ids == (5, 6, 2)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path} has no config.json"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config.json cannot be read: Expecting property name"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="does not hold a json object"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 0}, "config.json has vocab_size = 0"),
        ({"rope_scaling": {"type": "strange"}}, "config.json: RoPE scaling 'strange'"),
    ],
)
def test_a_bad_value_names_its_file(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}/{said}"):
        load_model_config(ModelSource("hf", tmp_path, "tiny", "tiny"))


def test_the_demo_gguf_is_read(demo_model: str) -> None:
    path = Path(demo_model)
    if path.suffix != ".gguf":
        pytest.skip("the demo model here is a folder")
    cfg = load_model_config(ModelSource("gguf", path, "demo", "demo"))
    assert (cfg.architecture, cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads) == ("LlamaForCausalLM", 30, 9, 3)
