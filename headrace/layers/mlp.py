# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block."""

from torch import Tensor, nn

from headrace.errors import ModelLoadError
from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.layers.build import BuildContext
from headrace.layers.linear import ColumnLinear, RowLinear

ACTIVATIONS = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
"""A checkpoint's `hidden_act` -> act(gate) * up over a fused [num_tokens, 2 * intermediate_size]."""


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ModelLoadError(f"hidden_act {activation!r} is not built; known: {', '.join(ACTIVATIONS)}.")
        self.gate_up_proj = ColumnLinear(ctx.sub("gate_up_proj"), hidden_size, [intermediate_size] * 2, bias)
        self.down_proj = RowLinear(ctx.sub("down_proj"), intermediate_size, hidden_size, bias)
        op = ACTIVATIONS[activation]
        act = op.choose(ctx.device.type, ctx.deterministic)
        self._gated = self.gate_up_proj.gated(act, op is gelu_tanh_and_mul)
        self._down = self.down_proj.forward

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._gated(x))
