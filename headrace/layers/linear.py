# SPDX-License-Identifier: Apache-2.0
"""Linear layers over a `QuantMethod`, which stores the weight and multiplies by it."""

from collections.abc import Callable

from torch import Tensor

from headrace.layers.build import BuildContext, LoadableLayer, empty_parameter
from headrace.quantization.base import RawTensor


class ColumnLinear(LoadableLayer):
    """x [num_tokens, in_features] -> [num_tokens, sum(out_features)]: projections fused side by side, cut by outputs.

    The parts (q, k, v or gate, up) load separately or as one tensor that the checkpoint keeps fused.
    """

    _bias: Tensor | None

    def __init__(self, ctx: BuildContext, in_features: int, out_features: list[int], bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = empty_parameter(ctx, sum(out_features)) if bias else None
        self.method = ctx.quant(ctx.prefix)
        self.method.create(self, in_features, out_features, ctx.dtype, ctx.device)
        # Plain attributes: a parameter read through nn.Module costs half a microsecond, once per layer and token.
        self._multiply = self.method.apply
        object.__setattr__(self, "_bias", self.bias)

    def part_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        shapes: dict[str, list[tuple[int, ...]]] = {"weight": [(n, self.in_features) for n in self.out_features]}
        if self.bias is not None:
            shapes["bias"] = [(n,) for n in self.out_features]
        return shapes

    def load_part(self, name: str, part: int, tensor: Tensor | RawTensor) -> None:
        if name == "weight":
            self.method.load_shard(self, tensor, part)
        else:
            assert self.bias is not None and isinstance(tensor, Tensor)
            start = sum(self.out_features[:part])
            self.bias[start : start + self.out_features[part]].copy_(tensor)

    def finish_load(self) -> None:
        self.method.finish(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(self, x, self._bias)

    def gated(self, act: Callable[[Tensor], Tensor], is_gelu: bool) -> Callable[[Tensor], Tensor]:
        """x -> act(product of gate and up), one kernel where the method has it. act: [n, 2 * width] -> [n, width]."""
        forward = self.forward
        fused = None if self.bias is not None else self.method.fused_gated(is_gelu)
        if fused is None:
            return lambda x: act(forward(x))
        max_rows, call = fused
        return lambda x: call(x) if x.shape[0] <= max_rows else act(forward(x))


class RowLinear(ColumnLinear):
    """x [num_tokens, in_features] -> [num_tokens, out_features], cut by inputs; its products are summed over ranks."""

    def __init__(self, ctx: BuildContext, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(ctx, in_features, [out_features], bias)
