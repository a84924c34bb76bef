# SPDX-License-Identifier: Apache-2.0
"""Products on a CPU for `deterministic`: in pieces of rows of proven sizes (`kernels/row_pieces.py`)."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from headrace.kernels.row_pieces import SIZES, agreeing_sizes, in_pieces
from headrace.quantization.base import FusedCall, QuantMethod, RawTensor


def orders_of_summing(in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """x [the largest size, in_features] and a weight [out_features, in_features], fp32, of bf16 numbers.

    Their product shows how it was summed: but for what rounding leaves over, everything cancels.
    """
    generator = torch.Generator().manual_seed(in_features)
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    first, second = order[:half], order[half : 2 * half]
    x = torch.randn(SIZES[-1], in_features, generator=generator)
    x = (x * 2.0 ** torch.randint(-6, 7, x.shape, generator=generator)).bfloat16().float()
    x[:, second] = -x[:, first]
    weight = torch.randn(min(out_features, 256), in_features, generator=generator).bfloat16().float()
    weight[:, second] = weight[:, first]
    return x, weight.repeat(-(-out_features // len(weight)), 1)[:out_features]


@cache
def proven_sizes(
    like: Callable[[], QuantMethod],
    in_features: int,
    out_features: int,
    has_bias: bool,
    dtype: torch.dtype,
    num_threads: int,
) -> tuple[int, ...]:
    """`agreeing_sizes` of a product of this shape, on so many threads."""
    layer, method, device = nn.Module(), like(), torch.device("cpu")
    x, weight = orders_of_summing(in_features, out_features)
    method.create(layer, in_features, [out_features], dtype, device)
    method.load_shard(layer, weight.to(dtype), 0)
    method.finish(layer)
    bias = torch.full((out_features,), 2.0**-12, dtype=dtype) if has_bias else None
    return agreeing_sizes(lambda rows: method.apply(layer, rows, bias), x.to(dtype))


class FixedRows:
    """A QuantMethod whose products are taken in pieces of proven sizes.

    method: stores and multiplies, for any number of rows by the same product. like: makes one that multiplies as it
    does, to find the sizes with. multiplies: the product is used.
    """

    def __init__(self, method: QuantMethod, like: Callable[[], QuantMethod], multiplies: bool = True) -> None:
        self._method = method
        self._like = like
        self._multiplies = multiplies
        self._sizes: tuple[int, ...] = SIZES[:1]

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Find the sizes for this shape, unless an equal layer has."""
        if self._multiplies:
            has_bias = "bias" in dict(layer.named_parameters(recurse=False))
            shape = in_features, sum(out_features), has_bias
            self._sizes = proven_sizes(self._like, *shape, dtype, torch.get_num_threads())
        self._method.create(layer, in_features, out_features, dtype, device)

    def load_shard(self, layer: nn.Module, weight: Tensor | RawTensor, shard: int) -> None:
        """See `QuantMethod.load_shard`."""
        self._method.load_shard(layer, weight, shard)

    def finish(self, layer: nn.Module) -> None:
        """See `QuantMethod.finish`."""
        self._method.finish(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        method = self._method
        return in_pieces(lambda rows, added: method.apply(layer, rows, added), self._sizes, x, bias)

    def fused_gated(self, is_gelu: bool) -> FusedCall | None:
        """None: a product of its own would be summed in an order of its own."""
        return None

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """ids [num_tokens] -> [num_tokens, in_features]."""
        return self._method.embed(layer, ids)
