# SPDX-License-Identifier: Apache-2.0
"""What a layer is built with, what a forward pass is given, and how a layer takes its weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headrace.attention.base import AttentionBackend, AttentionMetadata, AttentionNeed
from headrace.quantization.base import QuantMethod, RawTensor


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Everything that travels together while a model is built; `sub` goes down one name."""

    dtype: torch.dtype
    """Of weights and activations."""
    device: torch.device
    quant: Callable[[str], QuantMethod]
    """Checkpoint prefix of a linear or an embedding -> its storage and product."""
    backend: Callable[[AttentionNeed], AttentionBackend]
    """A layer's need -> a backend bound to it; raises with every refusal."""
    kv_dtype: torch.dtype
    """Of the KV cache; torch.float8_e4m3fn and torch.int8 are the 8-bit kinds (`kernels/kv_quant.py`)."""
    max_positions: int
    """Rows of the RoPE tables: the longest request, `max_seq_len`."""
    tokens_per_block: int = 32
    tp_rank: int = 0
    tp_size: int = 1
    prefix: str = ""
    """Dotted name of the module being built, as the checkpoint's weights will be called once renamed."""
    deterministic: bool = False
    """Each token is computed alike whatever is computed beside it: ops and methods are chosen for that."""
    tables: dict[object, Tensor] = field(default_factory=dict)
    """RoPE tables, one per distinct configuration, shared by the layers."""

    def sub(self, name: str) -> "BuildContext":
        """The context of the child `name`."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)


@dataclass(slots=True)
class ForwardContext:
    """One forward pass. Tokens may be padded at the end: padding has slot -1 and writes no KV."""

    input_ids: Tensor
    """int64 [num_tokens]."""
    positions: Tensor
    """int64 [num_tokens]: rows of the RoPE tables (a token's index in its request)."""
    attention: AttentionMetadata
    kv_caches: list[Tensor]
    """Per layer, a view [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim]."""
    groups: list[int]
    """Per layer, the KV group its block table and slots are in."""
    prompt_lens: Tensor | None = None
    """int32 [num_rows]: whole prompt of each row; read by models whose RoPE depends on it (see `layers/rope.py`)."""


class LoadableLayer(nn.Module):
    """A layer with weights. It declares the checkpoint tensors it takes, cut into parts (q, k, v of a fused
    projection), and is given each one; giving them again overwrites the same storage."""

    def part_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Local tensor name ("weight", "bias") -> the logical shape of each part, in order."""
        raise NotImplementedError

    def load_part(self, name: str, part: int, tensor: Tensor | RawTensor) -> None:
        """Store one part; its shape is `part_shapes()[name][part]`."""
        raise NotImplementedError

    def load_whole(self, name: str, tensor: Tensor | RawTensor) -> None:
        """Store a tensor that the checkpoint keeps already fused: its rows are the parts, one after another."""
        start = 0
        shapes = self.part_shapes()[name]
        for part, shape in enumerate(shapes):
            if len(shapes) == 1:
                self.load_part(name, part, tensor)
            elif isinstance(tensor, RawTensor):
                self.load_part(name, part, tensor.rows(torch.arange(start, start + shape[0])))
            else:
                self.load_part(name, part, tensor[start : start + shape[0]])
            start += shape[0]

    def finish_load(self) -> None:
        """Called once after each load, when every part has come."""


def empty_parameter(ctx: BuildContext, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialised storage on the context's device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype or ctx.dtype, device=ctx.device), requires_grad=False)
