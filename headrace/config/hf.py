# SPDX-License-Identifier: Apache-2.0
"""Hugging Face json -> the fields of `ModelConfig`. Any architecture that spells its values the common way is read;
whether there is code for it is the model registry's question."""

from collections.abc import Mapping
from typing import Any

from headrace.config.dtype import plain_dtype
from headrace.config.quantization import read_quantization
from headrace.config.rope import RopeConfig, read_rope
from headrace.errors import ModelLoadError

# What a checkpoint of this type means by a value that it leaves out, where that is not the common default.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "smollm3": {
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
}
COMMON_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# Values that a checkpoint with a nested text model may keep outside of it.
OUTER = (
    "architectures",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
READ = frozenset(
    {
        *OUTER,
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "hidden_activation",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "rope_local_base_freq",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "max_window_layers",
        "sliding_window_pattern",
        "no_rope_layers",
        "no_rope_layer_interval",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)


def read_hf(hf: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `ModelConfig`; see `ModelConfig.from_hf`."""
    flat = _flat(hf)
    model_type = str(flat.get("model_type") or "")
    if flat.get("use_bidirectional_attention"):
        raise ModelLoadError("config.json sets use_bidirectional_attention: an encoder, which cannot generate.")
    num_layers = _positive(flat, "num_hidden_layers")
    num_q_heads = _positive(flat, "num_attention_heads")
    hidden_size = _positive(flat, "hidden_size")
    if not flat.get("num_key_value_heads"):
        flat["num_key_value_heads"] = num_q_heads
    num_kv_heads = _positive(flat, "num_key_value_heads")
    if num_q_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json has {num_q_heads} attention heads, which {num_kv_heads} key-value heads do not divide."
        )
    if not flat.get("head_dim"):
        flat["head_dim"] = hidden_size // num_q_heads
    max_positions = _positive(flat, "max_position_embeddings")
    uses_rope = _layer_uses_rope(flat, num_layers)
    architecture = _architecture(flat, model_type)
    bias = bool(flat["attention_bias"])
    # Qwen2 has one on q, k and v and none on the output, whatever the file says.
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return {
        "architecture": architecture,
        "model_type": model_type,
        "vocab_size": _positive(flat, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(flat, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _positive(flat, "head_dim"),
        "rms_norm_eps": float(flat["rms_norm_eps"]),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": bool(flat["tie_word_embeddings"]),
        "hidden_act": str(flat.get("hidden_activation") or flat.get("hidden_act") or "silu"),
        **_ropes(flat, model_type, max_positions),
        "layer_uses_rope": uses_rope,
        "layer_windows": _layer_windows(flat, num_layers, uses_rope),
        "attention_bias": bias or is_qwen2,
        "attention_out_bias": bias and not is_qwen2,
        "mlp_bias": bool(flat["mlp_bias"]),
        "attn_softcap": flat.get("attn_logit_softcapping"),
        "final_logit_softcap": flat.get("final_logit_softcapping"),
        "query_pre_attn_scalar": flat.get("query_pre_attn_scalar"),
        "embedding_multiplier": hidden_size**0.5 if model_type.startswith("gemma") else None,
        "eos_token_ids": _eos_ids(generation_config, flat),
        "bos_token_id": _first_id(flat.get("bos_token_id")),
        "pad_token_id": _first_id(flat.get("pad_token_id")),
        "torch_dtype": _dtype(flat),
        **read_quantization(flat.get("quantization_config")),
        "extra": {key: value for key, value in flat.items() if key not in READ},
    }


def _flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    """One level: a nested text model's values over the outer ones that matter, with every default filled in."""
    text = hf.get("text_config")
    if isinstance(text, Mapping):
        flat = {key: hf[key] for key in OUTER if hf.get(key) is not None}
        flat.update({key: value for key, value in text.items() if value is not None or key not in flat})
        if not text.get("architectures"):
            flat["architectures"] = hf.get("architectures")
    else:
        flat = dict(hf)
    defaults = {**COMMON_DEFAULTS, **FAMILY_DEFAULTS.get(str(flat.get("model_type") or ""), {})}
    for key, value in defaults.items():
        # A window of null says "none"; elsewhere null says "the default".
        if key not in flat or (flat[key] is None and key != "sliding_window"):
            flat[key] = value
    return flat


def _positive(flat: Mapping[str, Any], key: str) -> int:
    value = flat.get(key)
    if value is None:
        raise ModelLoadError(
            f"config.json has no {key}: either the file is incomplete, or {_named(flat)} is not a language model of a "
            "kind that Headrace reads.",
            param=key,
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json has {key} = {value!r}; it must be a whole number of at least 1.", param=key)
    return value


def _named(flat: Mapping[str, Any]) -> str:
    names = flat.get("architectures") or [flat.get("model_type") or "this model"]
    return str(names[0])


def _architecture(flat: Mapping[str, Any], model_type: str) -> str:
    """The class name; where a config was saved without one, the usual one of its type."""
    names = flat.get("architectures")
    if names:
        return str(names[0])
    usual = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
    }
    if model_type in usual:
        return usual[model_type]
    raise ModelLoadError("config.json names no architecture (`architectures`) and no model_type that Headrace knows.")


def _ropes(flat: Mapping[str, Any], model_type: str, max_positions: int) -> dict[str, RopeConfig | None]:
    params = flat.get("rope_parameters") or {}
    if model_type == "phi3" and isinstance(flat.get("rope_scaling"), Mapping):
        # Early Phi-3 files call their longrope "yarn".
        scaling = dict(flat["rope_scaling"])
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in ("su", "yarn"):
            scaling["rope_type"] = "longrope"
        flat = {**flat, "rope_scaling": scaling}
    main = read_rope(flat, max_positions, "full_attention")
    local: RopeConfig | None = None
    if isinstance(params.get("sliding_attention"), Mapping):
        theta = flat.get("rope_local_base_freq") or flat.get("rope_theta")
        local = read_rope({**flat, "rope_theta": theta}, max_positions, "sliding_attention")
    elif flat.get("rope_local_base_freq"):
        local = RopeConfig(theta=float(flat["rope_local_base_freq"]))
    return {"rope": main, "rope_local": local}


def _layer_uses_rope(flat: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    listed = flat.get("no_rope_layers")
    if listed:
        # The name says the opposite: 1 is a layer with rotary positions.
        if len(listed) != num_layers:
            raise ModelLoadError(f"config.json lists {len(listed)} no_rope_layers for {num_layers} layers.")
        return tuple(bool(value) for value in listed)
    interval = flat.get("no_rope_layer_interval")
    if interval:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return (True,) * num_layers


def _layer_windows(flat: Mapping[str, Any], num_layers: int, uses_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    window = flat.get("sliding_window")
    if not window or flat.get("use_sliding_window") is False:
        window = None
    types = flat.get("layer_types")
    if types:
        strange = sorted(set(types) - {"full_attention", "sliding_attention"})
        if strange:
            raise ModelLoadError(f"config.json has layers of type {strange[0]!r}, which are not supported yet.")
        if len(types) < num_layers:
            raise ModelLoadError(f"config.json lists {len(types)} layer_types for {num_layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])
    if flat.get("sliding_window_pattern"):
        return tuple(window if (layer + 1) % flat["sliding_window_pattern"] else None for layer in range(num_layers))
    if flat.get("model_type") == "smollm3":
        return tuple(None if rotates else window for rotates in uses_rope)
    first = flat["max_window_layers"] if flat.get("use_sliding_window") and flat.get("max_window_layers") else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def _eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end token of the sources, each once, in order; negative ids mean none."""
    found = [token for source in sources for token in _ids(source.get("eos_token_id")) if token >= 0]
    return tuple(dict.fromkeys(found))


def _dtype(flat: Mapping[str, Any]) -> str | None:
    name = plain_dtype(flat.get("dtype") or flat.get("torch_dtype"))
    return name if name in ("float32", "bfloat16", "float16") else None
