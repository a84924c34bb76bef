# SPDX-License-Identifier: Apache-2.0
"""Products of few rows, bound by the reading of the weight: plain, and with a gated activation behind them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op

MAX_ROWS = 16
"""Above it a product is the library's."""
MAX_IN_FEATURES = 32768


def max_rows(in_features: int, out_features: list[int], compute_capability: tuple[int, int]) -> int:
    """The most rows for which our products measured faster than the library's; 0: none.

    out_features: of the parts of a fused weight.
    """
    if in_features > MAX_IN_FEATURES:
        return 0
    suits = all(n % 64 == 0 for n in out_features) and in_features % 128 == 0 and sum(out_features) <= 1 << 20
    return MAX_ROWS if suits and compute_capability >= (9, 0) else 2


def _operands(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + in_features)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    bias = torch.randn(out_features, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


SHAPES = (
    (1, 96, 48),
    (2, 576, 40),
    (2, 64, 33),
    (1, 320, 64),
    (1, 4100, 7),
    (2, 2048, 16),
    (3, 256, 64),
    (16, 1024, 128),
)


def linear_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Sizes that are and are not multiples of a tile; with and without a bias."""
    for index, shape in enumerate(SHAPES):
        x, weight, bias = _operands(*shape, dtype, device)
        yield Case("x".join(map(str, shape)), (x, weight, bias if index % 2 else None), weight.nbytes)


def gated_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The same, both activations."""
    for index, (rows, in_features, width) in enumerate(SHAPES):
        x, weight, _ = _operands(rows, in_features, 2 * width, dtype, device)
        yield Case(f"{rows}x{in_features}x{width}", (x, weight, bool(index % 2)), weight.nbytes)


@op(cases=linear_cases, rtol=1e-4, atol=1e-4)
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_rows, in_features] times weight [out_features, in_features] transposed, plus bias [out_features].

    num_rows is at most what `max_rows` says. Returns [num_rows, out_features] in x's dtype,
    summed in fp32.
    """
    return F.linear(x, weight, bias)


@op(cases=gated_cases, rtol=1e-4, atol=1e-4)
def skinny_gated(x: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * up of x times a weight [2 * width, in_features] that holds gate above up: [num_rows, width].

    act: SiLU, or GELU by tanh. Limits as above. The activation is taken of the rounded product, as where
    product and activation are two kernels.
    """
    gate, up = F.linear(x, weight).float().chunk(2, dim=-1)
    gate = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    return (gate * up).to(x.dtype)


for _op in (skinny_linear, skinny_gated):
    _op.impl("triton", on_cuda, f"headrace.kernels.skinny_triton:{_op.name}")
