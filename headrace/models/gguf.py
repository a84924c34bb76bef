# SPDX-License-Identifier: Apache-2.0
"""The tensors of a .gguf file under Hugging Face names, in Hugging Face order."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace.quantization.base import RawTensor
from headrace.quantization.gguf import PLAIN, unpack
from headrace.utils.gguf_file import GgufTensor, read_gguf

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_BLOCK = BLOCK | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Constants of the rotary embedding; `utils/gguf_meta.py` reads them into the config.
NOT_WEIGHTS = ("rope_freqs.weight", "attn_rot_embd.weight")
# These store q and k with each head's rotated pairs side by side; Hugging Face keeps first halves, then second halves.
PAIRED_ROPE = ("llama", "smollm3")


class GgufStream:
    """Yields (name, tensor): packed matrices as `RawTensor`, mapped from the file; the rest as dense tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        self._architecture: str = self._file.metadata["general.architecture"]
        self._tensors = [t for t in self._file.tensors.values() if not t.name.endswith(NOT_WEIGHTS)]
        self.total_bytes = sum(t.nbytes for t in self._tensors)

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path

    def __iter__(self) -> Iterator[tuple[str, Tensor | RawTensor]]:
        for entry in self._tensors:
            yield self._hf_name(entry.name), self._read(entry)

    def _hf_name(self, name: str) -> str:
        """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays."""
        block = GEMMA_BLOCK if self._architecture == "gemma3" else BLOCK
        match name.split("."):
            case ["blk", index, part, kind] if part in block:
                return f"model.layers.{index}.{block[part]}.{kind}"
            case [part, kind] if part in TOP:
                return f"{TOP[part]}.{kind}"
        return name

    def _read(self, entry: GgufTensor) -> Tensor | RawTensor:
        data = torch.from_numpy(self._file.read(entry))
        tensor: Tensor | RawTensor
        if entry.kind in PLAIN:
            tensor = data.view(-1).view(PLAIN[entry.kind]).view(entry.shape)
        elif len(entry.shape) == 2:
            tensor = RawTensor(data, entry.kind, entry.shape)
        else:
            tensor = unpack(data, entry.kind).view(entry.shape)
        order = self._row_order(entry)
        if order is not None:
            return tensor.rows(order) if isinstance(tensor, RawTensor) else tensor[order]
        # Gemma's norms are stored with 1 added.
        if self._architecture == "gemma3" and entry.name.endswith("norm.weight") and isinstance(tensor, Tensor):
            return tensor.float() - 1.0
        return tensor

    def _row_order(self, entry: GgufTensor) -> Tensor | None:
        """Which stored row each row of q or k is: every head's even rows, then its odd ones."""
        part = entry.name.split(".")[-2]
        if self._architecture not in PAIRED_ROPE or part not in ("attn_q", "attn_k"):
            return None
        keys = self._file.metadata
        heads = keys[f"{self._architecture}.attention.head_count"]
        if part == "attn_k":
            heads = keys.get(f"{self._architecture}.attention.head_count_kv", heads)
        return torch.arange(entry.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
