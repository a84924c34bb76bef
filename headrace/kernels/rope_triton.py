# SPDX-License-Identifier: Apache-2.0
"""Triton: q/k norm, rotary and cache write in one pass over the QKV product."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.kv_quant_triton import finite, int8_scale, kv_kind, store_scale, to_fp8, to_int8
from headrace.kernels.pdl import pdl

TILE = 1024
"""Values a program holds: a few heads of one token."""


@triton.jit
def head_weight(q_norm, k_norm, column, inside, offset, is_q, is_k, HAS_Q: tl.constexpr, HAS_K: tl.constexpr):
    """The norm's weight for each head and column; 1 where a head has no norm."""
    weight = tl.where(is_q[:, None] & inside[None, :], 1.0, 1.0)
    if HAS_Q:
        loaded = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32) + offset
        weight = tl.where(is_q[:, None], loaded[None, :], weight)
    if HAS_K:
        loaded = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32) + offset
        weight = tl.where(is_k[:, None], loaded[None, :], weight)
    return weight


@triton.jit
def store_head(target, first, second, rest, mask, column, rest_column, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Write heads to `target` [heads, 1] where `mask` [heads, 1]."""
    dtype = target.dtype.element_ty
    inside = mask & (column < HALF)[None, :]
    tl.store(target + column[None, :], first.to(dtype), mask=inside)
    tl.store(target + HALF + column[None, :], second.to(dtype), mask=inside)
    if 2 * HALF < HEAD_DIM:
        tl.store(target + rest_column[None, :], rest.to(dtype), mask=mask & (rest_column < HEAD_DIM)[None, :])


@triton.jit
def head_scale(first, second, rest, normed, eps, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    """1 / rms of each head that has a norm, 1 of the others: [heads, 1]."""
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST > 0:
        square += tl.sum(rest * rest, axis=1)
    return tl.where(normed, tl.rsqrt(square / HEAD_DIM + eps), 1.0)[:, None]


@triton.jit
def rotate(first, second, cos, sin, turned):
    """Turn the pairs of the heads that are turned."""
    turned_first = first * cos - second * sin
    return tl.where(turned, turned_first, first), tl.where(turned, second * cos + first * sin, second)


@triton.jit
def store_kv(
    cache, kv_scale, first, second, rest, head, slot, column, rest_column, block_stride, kv_stride, head_stride,
    token_stride, num_kv_heads, tokens_per_block, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Write heads, K's before V's, to the cache as its kind asks (`kernels.kv_quant_triton`)."""
    is_kv = (head >= 0) & (head < 2 * num_kv_heads)
    is_v = head >= num_kv_heads
    kv_head = head - tl.where(is_v, num_kv_heads, 0)
    place = cache + tl.where(is_v, kv_stride, 0) + kv_head.to(tl.int64) * head_stride
    place += (slot // tokens_per_block) * block_stride
    in_block = slot % tokens_per_block
    if KV == "int8":
        first, second, rest = finite(first), finite(second), finite(rest)
        most = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        if 2 * HALF < HEAD_DIM:
            most = tl.maximum(most, tl.max(tl.abs(rest), axis=1))
        scale, inverse = int8_scale(most)
        store_scale(place + tokens_per_block * HEAD_DIM + 2 * in_block, scale, is_kv)
        first = to_int8(first * inverse[:, None])
        second = to_int8(second * inverse[:, None])
        rest = to_int8(rest * inverse[:, None])
    elif KV != "plain":
        scale = tl.load(kv_scale + tl.where(is_v, num_kv_heads, 0) + kv_head, mask=is_kv, other=1.0)
        inverse = tl.div_rn(1.0, scale)[:, None]
        first = to_fp8(first * inverse)
        second = to_fp8(second * inverse)
        rest = to_fp8(rest * inverse)
    target = (place + in_block * token_stride)[:, None]
    store_head(target, first, second, rest, is_kv[:, None], column, rest_column, HEAD_DIM, HALF)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def qk_norm_rope_cache_write_kernel(
    qkv,
    q_norm,
    k_norm,
    table,
    positions,
    cache,
    kv_scale,
    slots,
    out,
    qkv_stride,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    eps,
    offset,
    num_q_heads,
    num_kv_heads,
    tokens_per_block,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # A head is first [HALF], second [HALF] and rest [HEAD_DIM - 2 * HALF], the part that is not turned.
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_q = head < num_q_heads
    is_k = (head >= num_q_heads) & (head < num_q_heads + num_kv_heads)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    rest_column = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_rest = rest_column < HEAD_DIM
    there = (head < num_q_heads + 2 * num_kv_heads)[:, None]
    # Weights and the step's lists are older than the kernel before this one, so they are read without waiting for it.
    slot = tl.load(slots + token).to(tl.int64)
    if HAS_ROPE:
        angle = table + tl.load(positions + token) * table_stride + column
        cos = tl.load(angle, mask=inside, other=1.0)[None, :]
        sin = tl.load(angle + HALF, mask=inside, other=0.0)[None, :]
    if HAS_Q_NORM or HAS_K_NORM:
        first_weight = head_weight(q_norm, k_norm, column, inside, offset, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)
        second_weight = head_weight(q_norm, k_norm, HALF + column, inside, offset, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)
        if REST > 0:
            rest_weight = head_weight(q_norm, k_norm, rest_column, in_rest, offset, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)
    if PDL:
        gdc_wait()
    source = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    first = tl.load(source + column[None, :], mask=there & inside[None, :], other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column[None, :], mask=there & inside[None, :], other=0.0).to(tl.float32)
    rest = first
    if REST > 0:
        rest = tl.load(source + rest_column[None, :], mask=there & in_rest[None, :], other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        normed = (is_q & HAS_Q_NORM) | (is_k & HAS_K_NORM)
        scale = head_scale(first, second, rest, normed, eps, HEAD_DIM, REST)
        first *= scale * first_weight
        second *= scale * second_weight
        if REST > 0:
            rest *= scale * rest_weight
    if HAS_ROPE:
        first, second = rotate(first, second, cos, sin, (is_q | is_k)[:, None])
    q_target = out + (token * num_q_heads + head[:, None]) * HEAD_DIM
    store_head(q_target, first, second, rest, is_q[:, None], column, rest_column, HEAD_DIM, HALF)
    if slot >= 0:
        store_kv(
            cache, kv_scale, first, second, rest, head - num_q_heads, slot, column, rest_column, block_stride,
            kv_stride, head_stride, token_stride, num_kv_heads, tokens_per_block, HEAD_DIM, HALF, KV,
        )  # fmt: skip


def qk_norm_rope_cache_write(
    qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor | None,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_offset: float = 0.0,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """See `kernels.rope.qk_norm_rope_cache_write`."""
    num_tokens = qkv.shape[0]
    dtype = torch.float32 if kv_cache.dtype == torch.float32 else qkv.dtype
    out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=dtype, device=qkv.device)
    half = (head_dim if cos_sin_cache is None else cos_sin_cache.shape[1]) // 2
    block_half = triton.next_power_of_2(half)
    rest = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    block_heads = max(TILE // (2 * block_half), 1)
    if num_tokens == 0:
        return out
    qk_norm_rope_cache_write_kernel[(num_tokens, triton.cdiv(num_q_heads + 2 * num_kv_heads, block_heads))](
        qkv,
        qkv if q_norm_weight is None else q_norm_weight,
        qkv if k_norm_weight is None else k_norm_weight,
        qkv if cos_sin_cache is None else cos_sin_cache,
        positions,
        kv_cache,
        qkv if kv_scale is None else kv_scale,
        slot_mapping,
        out,
        qkv.stride(0),
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        *kv_cache.stride()[:4],
        eps,
        norm_offset,
        num_q_heads,
        num_kv_heads,
        kv_cache.shape[3],
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=rest,
        HAS_Q_NORM=q_norm_weight is not None,
        HAS_K_NORM=k_norm_weight is not None,
        HAS_ROPE=cos_sin_cache is not None,
        KV=kv_kind(kv_cache),
        num_warps=4,
        **pdl(qkv.device),
    )
    return out
