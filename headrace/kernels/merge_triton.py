# SPDX-License-Identifier: Apache-2.0
"""Triton: merging attention over two sets of keys."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def merge_attention_kernel(
    out,
    lse,
    other,
    other_lse,
    num_tokens,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < num_tokens
    at = head.to(tl.int64) * num_tokens + token
    first = tl.load(lse + at, mask=there, other=0.0)
    second = tl.load(other_lse + at, mask=there, other=0.0)
    most = tl.maximum(first, second)
    both = most + tl.log(tl.exp(first - most) + tl.exp(second - most))
    column = tl.arange(0, BLOCK_DIM)
    offset = token.to(tl.int64)[:, None] * token_stride + head * head_stride + column[None, :]
    inside = there[:, None] & (column < HEAD_DIM)[None, :]
    value = tl.load(out + offset, mask=inside, other=0.0).to(tl.float32) * tl.exp(first - both)[:, None]
    value += tl.load(other + offset, mask=inside, other=0.0).to(tl.float32) * tl.exp(second - both)[:, None]
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + at, both, mask=there)


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.merge.merge_attention`."""
    num_tokens, num_heads, head_dim = out.shape
    merge_attention_kernel[(triton.cdiv(num_tokens, 32), num_heads)](
        out,
        lse,
        other,
        other_lse,
        num_tokens,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK=32,
        num_warps=4,
    )
    return out, lse
