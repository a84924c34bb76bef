# SPDX-License-Identifier: Apache-2.0
"""Weights as they are: one dense tensor, one matmul."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels.fixed_tile import fixed_tile_linear
from headrace.kernels.skinny import max_rows, skinny_gated, skinny_linear
from headrace.quantization.base import FusedCall, RawTensor, copy_weight


class PlainMethod:
    """The weight in the model's dtype; packed checkpoint tensors are unpacked while they load."""

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate [sum(out_features), in_features]."""
        self.out_features = out_features
        weight = torch.empty(sum(out_features), in_features, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        # The same storage, read without nn.Module's lookup.
        self._weight = layer.weight.data
        # Of few rows the library leaves a tenth to a third of the bandwidth unused.
        is_skinny = device.type == "cuda" and dtype != torch.float32
        capability = torch.cuda.get_device_capability(device) if is_skinny else (0, 0)
        self._skinny_rows = max_rows(in_features, out_features, capability) if is_skinny else 0
        self._skinny: Callable[[Tensor, Tensor, Tensor | None], Tensor] = skinny_linear.choose(device.type)
        self._skinny_gated: Callable[[Tensor, Tensor, bool], Tensor] = skinny_gated.choose(device.type)

    def load_shard(self, layer: nn.Module, weight: Tensor | RawTensor, shard: int) -> None:
        """Copy one part to its rows."""
        start = sum(self.out_features[:shard])
        copy_weight(self._weight[start : start + self.out_features[shard]], weight)

    def finish(self, layer: nn.Module) -> None:
        """Nothing is left to do."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        if x.shape[0] <= self._skinny_rows:
            return self._skinny(x, self._weight, bias)
        return F.linear(x, self._weight, bias)

    def fused_gated(self, is_gelu: bool) -> FusedCall | None:
        """See `QuantMethod.fused_gated`."""
        if not self._skinny_rows:
            return None
        weight, call = self._weight, self._skinny_gated
        return self._skinny_rows, lambda x: call(x, weight, is_gelu)

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """ids [num_tokens] -> [num_tokens, in_features]."""
        return F.embedding(ids, self._weight)


class FixedTileMethod(PlainMethod):
    """The same weight on a GPU, multiplied in one fixed tile whatever the number of rows, for `deterministic`."""

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """See `PlainMethod.create`."""
        super().create(layer, in_features, out_features, dtype, device)
        self._multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = fixed_tile_linear.choose(device.type, True)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        return self._multiply(x, self._weight, bias)

    def fused_gated(self, is_gelu: bool) -> FusedCall | None:
        """None: a product of its own would be summed in an order of its own."""
        return None
