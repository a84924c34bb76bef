# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and with the residual add that comes before it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.op import Case, on_cpu, on_cuda, op

SHAPES = ((1, 576), (5, 64), (3, 1000), (64, 4096), (2, 12288))
"""(num_tokens, hidden_size)"""


def norm_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Widths that are and are not powers of two; Gemma's offset; a row of zeros."""
    for num_tokens, hidden in SHAPES:
        for offset in (0.0, 1.0):
            generator = torch.Generator().manual_seed(num_tokens * hidden)
            x = torch.randn(num_tokens, hidden, generator=generator)
            x[-1] *= 0.0 if num_tokens > 1 else 1.0
            weight = torch.randn(hidden, generator=generator)
            args = (x.to(device, dtype), weight.to(device, dtype), 1e-5, offset)
            yield Case(f"{num_tokens}x{hidden}+{offset:g}", args, 2 * args[0].nbytes + args[1].nbytes)


def fused_add_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The same with a residual."""
    for case in norm_cases(dtype, device):
        x, weight, eps, offset = case.args
        residual = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        yield Case(case.name, (x, residual, weight, eps, offset), 4 * x.nbytes + weight.nbytes)


@op(cases=norm_cases)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, in fp32 inside.

    x: [..., hidden]. weight: [hidden]. offset: 1.0 for Gemma, whose weights are stored minus one. Returns x's dtype.
    """
    if offset:
        weight = weight.float() + offset
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


@op(cases=fused_add_cases)
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). Both x and residual may be overwritten: use what is returned.

    x, residual: [num_tokens, hidden]; the sum is rounded to residual's dtype before the norm reads it.
    """
    residual = residual.add_(x)
    return rms_norm.reference(residual, weight, eps, offset), residual


# Up to so many rows, the detour by layer_norm is faster: one bf16 row of 576 takes 17 us instead of 28, 16 take 33
# instead of 38, 32 as long either way (two cores of a Sapphire Rapids).
FEW_ROWS = 16


@rms_norm.impl("cpu rows", on_cpu, use="deterministic")
def rms_norm_cpu_rows(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Through layer_norm, torch's one fused norm on the CPU, which goes row by row: x beside -x has mean 0 and x's mean
    square."""
    hidden = weight.shape[0]
    if offset:
        normed: Tensor = rms_norm.reference(x, weight, eps, offset)
        return normed
    both = F.layer_norm(torch.cat((x, -x), -1), (2 * hidden,), torch.cat((weight, weight)), None, eps)
    return both[..., :hidden].contiguous()


@rms_norm.impl("cpu", on_cpu, use="fast")
def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Few rows through layer_norm."""
    if x.numel() > FEW_ROWS * weight.shape[0]:
        normed: Tensor = rms_norm.reference(x, weight, eps, offset)
        return normed
    return rms_norm_cpu_rows(x, weight, eps, offset)


@fused_add_rms_norm.impl("cpu rows", on_cpu, use="deterministic")
def fused_add_rms_norm_cpu_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same after the sum."""
    residual = residual.add_(x)
    return rms_norm_cpu_rows(residual, weight, eps, offset), residual


@fused_add_rms_norm.impl("cpu", on_cpu, use="fast")
def fused_add_rms_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same after the sum."""
    residual = residual.add_(x)
    return rms_norm_cpu(residual, weight, eps, offset), residual


rms_norm.impl("triton", on_cuda, "headrace.kernels.norm_triton:rms_norm")
fused_add_rms_norm.impl("triton", on_cuda, "headrace.kernels.norm_triton:fused_add_rms_norm")
