# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone or fused with the residual addition before it."""

from torch import Tensor

from headrace.kernels.norm import fused_add_rms_norm, rms_norm
from headrace.layers.build import BuildContext, LoadableLayer, empty_parameter
from headrace.quantization.base import RawTensor


class RMSNorm(LoadableLayer):
    """x / rms(x) * (offset + weight) over the last dimension, in fp32, rounded to x's dtype."""

    _weight: Tensor

    def __init__(self, ctx: BuildContext, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = empty_parameter(ctx, size)
        self._eps = eps
        self._offset = offset
        self._norm = rms_norm.choose(ctx.device.type, ctx.deterministic)
        self._add_norm = fused_add_rms_norm.choose(ctx.device.type, ctx.deterministic)
        object.__setattr__(self, "_weight", self.weight)

    def part_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        return {"weight": [tuple(self.weight.shape)]}

    def load_part(self, name: str, part: int, tensor: Tensor | RawTensor) -> None:
        assert isinstance(tensor, Tensor)
        self.weight.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x, self._weight, self._eps, self._offset)
        return normed

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Both arguments may be overwritten."""
        both: tuple[Tensor, Tensor] = self._add_norm(x, residual, self._weight, self._eps, self._offset)
        return both
