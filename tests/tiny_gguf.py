# SPDX-License-Identifier: Apache-2.0
"""Small .gguf files, written with the `gguf` package as a converter would."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 80
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_weights(architecture: str = "llama", tied: bool = True, bias: bool = False) -> dict[str, Tensor]:
    """Weights of a tiny model under Hugging Face names, fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    layer = dict(LAYER_SHAPES)
    if architecture in ("qwen3", "gemma3"):
        layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    if architecture == "gemma3":
        layer |= {"pre_feedforward_layernorm": (HIDDEN,), "post_feedforward_layernorm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if bias:
            shapes |= {f"model.layers.{i}.{n}.bias": s[:1] for n, s in layer.items() if n[-6:] in ("q_proj", "k_proj")}
            shapes[f"model.layers.{i}.self_attn.v_proj.bias"] = layer["self_attn.v_proj"][:1]
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def converted(architecture: str, name: str, weight: Tensor) -> tuple[str, np.ndarray]:
    """A Hugging Face tensor as a converter stores it: GGUF's name, rotated pairs side by side, Gemma's norms plus 1."""
    names = GEMMA_NAMES if architecture == "gemma3" else LLAMA_NAMES
    stem, _, kind = name.rpartition(".")
    array = weight.numpy()
    if architecture in ("llama", "smollm3") and stem.endswith(("q_proj", "k_proj")):
        heads = HEADS if stem.endswith("q_proj") else KV_HEADS
        rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
    if architecture == "gemma3" and stem.endswith("norm"):
        array = array + 1
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}", array
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{kind}", array


def write_gguf(
    path: Path,
    weights: dict[str, Tensor],
    architecture: str = "llama",
    kind: str = "F32",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a file whose matrices are of type `kind`. keys: more keys of the architecture; extra: more tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (keys or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{key}", value)
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"t{i}" for i in range(4, VOCAB))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 3] + [1] * (VOCAB - 4))
    writer.add_token_merges(["t 4", "t 5"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        stored, array = converted(architecture, name, weight)
        if kind == "F32" or array.ndim == 1:
            writer.add_tensor(stored, array.astype(np.float32))
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, quantize(array.astype(np.float32), raw), raw_dtype=raw)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
