# SPDX-License-Identifier: Apache-2.0
"""Gated activations over a fused gate/up product."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op


def gated_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Widths that are and are not powers of two, and values on both tails."""
    for num_tokens, width in ((1, 1536), (7, 96), (33, 1000), (3, 12288)):
        generator = torch.Generator().manual_seed(width)
        x = (4 * torch.randn(num_tokens, 2 * width, generator=generator)).to(device, dtype)
        yield Case(f"{num_tokens}x{width}", (x,), x.nbytes * 3 // 2)


@op(cases=gated_cases)
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. x: [num_tokens, 2 * width], gate first. Returns [num_tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@op(cases=gated_cases)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(gate, tanh approximation) * up. x: [num_tokens, 2 * width], gate first. Returns [num_tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


silu_and_mul.impl("triton", on_cuda, "headrace.kernels.activation_triton:silu_and_mul")
gelu_tanh_and_mul.impl("triton", on_cuda, "headrace.kernels.activation_triton:gelu_tanh_and_mul")
