# SPDX-License-Identifier: Apache-2.0
"""How a linear layer stores its weight and multiplies by it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.quantization.gguf import unpack

CHUNK_VALUES = 1 << 22

FusedCall = tuple[int, Callable[[Tensor], Tensor]]
"""(the most rows of x that it is for, the call)."""


class QuantMethod(Protocol):
    """Storage and product of one linear layer. One instance per layer; the layer owns the tensors.

    Life: `create` once, then for each load `load_shard` per checkpoint tensor and `finish` once; a second load runs the
    same calls into the same storage, and no tensor that `apply` reads changes its address.
    """

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the layer's storage. `out_features` lists the fused outputs (q, k, v or gate, up) in order.

        The layer has its bias already, if it has one.
        """
        ...

    def load_shard(self, layer: nn.Module, weight: "Tensor | RawTensor", shard: int) -> None:
        """Take one fused part's weight [out_features[shard], in_features], as the checkpoint stores it."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """After the last shard: repack into what `apply` reads."""
        ...

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        ...

    def fused_gated(self, is_gelu: bool) -> FusedCall | None:
        """The product of gate and up with the activation behind it as one call, and the most rows it is for.

        x: [num_tokens, in_features] -> act(gate) * up [num_tokens, out_features[0]]; act is GELU by tanh or SiLU. None:
        the method has no such call. Asked once, after `create`; the layer has no bias.
        """
        ...

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Rows of an embedding's weight: ids [num_tokens] -> [num_tokens, in_features]."""
        ...


class RawTensor:
    """A tensor in a packed checkpoint format (today GGUF's): its bytes and how to unpack them.

    shape: logical [out, in]. kind: the GGUF type's name, such as "Q4_1". data: uint8 [out, bytes_per_row].
    """

    __slots__ = ("data", "kind", "shape")

    def __init__(self, data: Tensor, kind: str, shape: tuple[int, ...]) -> None:
        self.data = data
        self.kind = kind
        self.shape = shape

    def rows(self, index: Tensor | slice) -> "RawTensor":
        """The same tensor with its rows reordered or sliced."""
        data = self.data[index]
        return RawTensor(data, self.kind, (len(data), *self.shape[1:]))

    def dequantize(self) -> Tensor:
        """fp32 values of the whole tensor."""
        return unpack(self.data, self.kind).reshape(self.shape)

    def copy_to(self, target: Tensor) -> None:
        """Unpack into `target` [out, in], of any dtype and device, a few rows at a time: memory stays bounded."""
        step = max(1, CHUNK_VALUES // max(1, self.shape[-1]))
        for start in range(0, len(self.data), step):
            target[start : start + step].copy_(unpack(self.data[start : start + step], self.kind))


def copy_weight(target: Tensor, weight: Tensor | RawTensor) -> None:
    """Copy a checkpoint's tensor into `target`, converting it."""
    if isinstance(weight, RawTensor):
        weight.copy_to(target)
    else:
        target.copy_(weight)
