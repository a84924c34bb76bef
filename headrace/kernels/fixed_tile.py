# SPDX-License-Identifier: Apache-2.0
"""A product in which a row's result is the same whatever the number of rows: for `deterministic`."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op

# num_rows, in_features, out_features
SHAPES = ((1, 96, 48), (3, 576, 40), (65, 64, 129), (2, 100, 64), (70, 320, 300), (16, 2048, 128), (200, 256, 64))


def linear_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Sizes that are and are not multiples of a tile, split inputs for few rows and many; with and without a bias."""
    for index, (num_rows, in_features, out_features) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(num_rows + in_features)
        x = torch.randn(num_rows, in_features, generator=generator)
        weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
        bias = torch.randn(out_features, generator=generator).to(device, dtype) if index % 2 else None
        args = (x.to(device, dtype), weight.to(device, dtype), bias)
        yield Case(f"{num_rows}x{in_features}x{out_features}", args, args[1].nbytes)


@op(cases=linear_cases, rtol=1e-4, atol=1e-4)
def fixed_tile_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_rows, in_features] times weight [out_features, in_features] transposed, plus bias [out_features].

    Returns [num_rows, out_features] in x's dtype, summed in fp32.
    """
    return F.linear(x, weight, bias)


fixed_tile_linear.impl("triton", on_cuda, "headrace.kernels.fixed_tile_triton:fixed_tile_linear")
