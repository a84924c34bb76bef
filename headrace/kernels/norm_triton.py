# SPDX-License-Identifier: Apache-2.0
"""Triton: RMSNorm, one program a row, the row held in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.pdl import pdl, wait_for_previous


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    x_stride,
    out_stride,
    hidden,
    eps,
    offset,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * scale
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fused_add_rms_norm_kernel(
    x,
    residual,
    weight,
    x_stride,
    residual_stride,
    hidden,
    eps,
    offset,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x += row * x_stride + column
    residual += row * residual_stride + column
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * scale
    tl.store(x, value.to(x.dtype.element_ty), mask=inside)


def num_warps(block: int) -> int:
    """Sixteen values a thread, up to 16 warps."""
    return min(max(block // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    if rows.shape[0]:
        rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), hidden, hidden, eps, offset, BLOCK=block, num_warps=num_warps(block),
            **pdl(x.device),
        )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `kernels.norm.fused_add_rms_norm`; writes over both."""
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if num_tokens:
        fused_add_rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            x.stride(0),
            residual.stride(0),
            hidden,
            eps,
            offset,
            BLOCK=block,
            num_warps=num_warps(block),
            **pdl(x.device),
        )
    return x, residual
