# SPDX-License-Identifier: Apache-2.0
"""Attention over two sets of keys, put together from the attention over each."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op


def merge_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Sets of equal and of very different weight."""
    generator = torch.Generator().manual_seed(2)
    for rows, heads, head_dim in ((5, 3, 64), (1, 1, 80)):
        outs = [torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype) for _ in range(2)]
        sums = [(torch.randn(heads, rows, generator=generator) * 20).to(device) for _ in range(2)]
        yield Case(f"{rows}x{heads}x{head_dim}", (outs[0], sums[0], outs[1], sums[1]), 3 * outs[0].nbytes)


@op(cases=merge_cases)
def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `other` into `out`, and `other_lse` into `lse`, in place.

    out, other: [num_tokens, num_heads, head_dim], strided alike. lse, other_lse: fp32 [num_heads, num_tokens],
    contiguous: the natural log of the sum of exp of each query's scores.
    """
    both = torch.logaddexp(lse, other_lse)
    of_out, of_other = ((each - both).exp().t().unsqueeze(-1) for each in (lse, other_lse))
    out.copy_(out.float() * of_out + other.float() * of_other)
    lse.copy_(both)
    return out, lse


merge_attention.impl("triton", on_cuda, "headrace.kernels.merge_triton:merge_attention")
