# SPDX-License-Identifier: Apache-2.0
"""Triton: gated activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.pdl import pdl, wait_for_previous

BLOCK = 1024


@triton.jit
def act_and_mul(gate, up, IS_GELU: tl.constexpr):
    """SiLU or GELU by tanh of gate, times up."""
    # GELU by tanh is gate * sigmoid(2 * sqrt(2 / pi) * (gate + 0.044715 * gate ** 3)).
    turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    return gate / (1.0 + tl.exp(-turn)) * up


@triton.jit
def gated_kernel(x, out, x_stride, width, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * x_stride + column
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width, mask=inside, other=0.0).to(tl.float32)
    value = act_and_mul(gate, up, IS_GELU)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def gated(x: Tensor, is_gelu: bool) -> Tensor:
    """Both activations' launch."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, BLOCK))
        gated_kernel[grid](x, out, x.stride(0), width, BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=4, **pdl(x.device))
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See `kernels.activation.silu_and_mul`."""
    return gated(x, is_gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `kernels.activation.gelu_tanh_and_mul`."""
    return gated(x, is_gelu=True)
