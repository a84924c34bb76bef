# SPDX-License-Identifier: Apache-2.0
"""Triton: copying KV blocks, and one row's KV out of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.kv_cache import BITS
from headrace.kernels.kv_quant_triton import from_fp8, kv_kind, load_scale

BLOCK = 4096


@triton.jit
def copy_blocks_kernel(arena, pairs, block_size, block_stride, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0) * 2
    source = tl.load(pair).to(tl.int64)
    target = tl.load(pair + 1).to(tl.int64)
    if source >= 0:
        element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = element < block_size
        value = tl.load(arena + source * block_stride + element, mask=inside)
        tl.store(arena + target * block_stride + element, value, mask=inside)


def copy_blocks(arena: Tensor, pairs: Tensor) -> Tensor:
    """See `kernels.kv_cache.copy_blocks`."""
    if pairs.shape[0]:
        block_size = arena[0].numel()
        bits = arena.view(BITS[arena.dtype.itemsize])
        grid = (pairs.shape[0], triton.cdiv(block_size, BLOCK))
        copy_blocks_kernel[grid](bits, pairs, block_size, arena.stride(0), BLOCK=BLOCK, num_warps=8)
    return arena


@triton.jit(do_not_specialize=["length", "size"], do_not_specialize_on_alignment=["table"])
def gather_row_kernel(
    cache,
    table,
    out,
    kv_scale,
    length,
    size,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    KV: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    inside = (column < HEAD_DIM)[None, :]
    there = token < length
    block = tl.load(table + token // TOKENS_PER_BLOCK, mask=there, other=0).to(tl.int64)
    tile = block * block_stride + (head // num_heads).to(tl.int64) * kv_stride + (head % num_heads) * head_stride
    source = tile + (token % TOKENS_PER_BLOCK) * token_stride
    value = tl.load(cache + source[:, None] + column[None, :], mask=there[:, None] & inside, other=0)
    if KV == "int8":
        place = cache + tile + TOKENS_PER_BLOCK * HEAD_DIM + 2 * (token % TOKENS_PER_BLOCK)
        value = value.to(tl.float32) * load_scale(place, there)[:, None]
    elif KV != "plain":
        value = from_fp8(value, KV).to(tl.float32) * tl.load(kv_scale + head)
    target = (head.to(tl.int64) * size + token) * HEAD_DIM
    value = value.to(out.dtype.element_ty)
    tl.store(out + target[:, None] + column[None, :], value, mask=(token < size)[:, None] & inside)


def gather_row(
    kv_cache: Tensor,
    table: Tensor,
    length: int,
    size: int,
    dtype: torch.dtype | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """See `kernels.kv_cache.gather_row`."""
    _, _, heads, per_block, head_dim = kv_cache.shape
    kind = kv_kind(kv_cache)
    kept = kv_cache.dtype if kind == "plain" else dtype
    out = torch.empty(2, heads, size, head_dim, dtype=kept, device=kv_cache.device)
    gather_row_kernel[(triton.cdiv(size, 64), 2 * heads)](
        kv_cache,
        table,
        out,
        out if kv_scale is None else kv_scale,
        length,
        size,
        *kv_cache.stride()[:4],
        heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        TOKENS_PER_BLOCK=per_block,
        BLOCK=64,
        KV=kind,
        num_warps=4,
    )
    return out
