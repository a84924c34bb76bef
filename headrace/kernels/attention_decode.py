# SPDX-License-Identifier: Apache-2.0
"""Triton: attention of rows with one new token each over their paged KV, split over the keys and put together again.

One program per share of the step's plan (`attention_plan`) and KV head, and one small reduction for the rows that were
cut. Grids follow the number of rows alone, never their lengths, so a captured graph stays right.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.attention_plan import RECORD, DecodePlan
from headrace.kernels.attention_tile import (
    Tile,
    block_dim,
    cache_strides,
    decode_tile,
    multiplied_size,
    prepare_query,
    read_keys,
    read_values,
    scale_scores,
    shared_memory,
    softmax_scale,
)
from headrace.kernels.kv_quant_triton import kv_kind
from headrace.kernels.pdl import pdl

FEW_ITEMS = 8
"""Items of a row that the reduction takes at once where there are many rows; four times as many where there are few."""


@triton.jit
def load_item(items, item, RECORD: tl.constexpr):
    """An item's row, query's place, first key, end of keys, first key seen, and whether it is all of its row."""
    record = items + item * RECORD
    row = tl.load(record)
    query_row = tl.load(record + 1)
    begin = tl.load(record + 2)
    end = tl.load(record + 3)
    seen = tl.load(record + 4)
    is_all = tl.load(record + 5)
    return row, query_row, begin, end, seen, is_all


@triton.jit
def attend_item(
    q,
    factors,
    keys,
    values,
    table,
    block_stride,
    begin,
    end,
    seen,
    scale_log2,
    softcap,
    HEAD_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
):
    """Attend q [BLOCK_M, BLOCK_DIM] to the keys begin to end; begin is a multiple of BLOCK_N. See `attend_range`."""
    column = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    # Summed over a tile's keys only at the end, so that the loop has one exchange between lanes, not two.
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if WINDOW > 0:
        begin = tl.maximum(begin, seen // BLOCK_N * BLOCK_N)
    ONE_BLOCK: tl.constexpr = TOKENS_PER_BLOCK % BLOCK_N == 0
    # Block ids are loaded a tile ahead of K and V: those can then be on their way for several tiles at a time.
    last_block = (end - 1) // TOKENS_PER_BLOCK
    if ONE_BLOCK:
        block = tl.load(table + begin // TOKENS_PER_BLOCK)
    else:
        block = tl.load(table + tl.minimum((begin + lane) // TOKENS_PER_BLOCK, last_block))
    for start in tl.range(begin, end, BLOCK_N):
        key = start + lane
        inside = key < end
        if ONE_BLOCK:
            base = block.to(tl.int64) * block_stride + (start % TOKENS_PER_BLOCK) * TOKEN_STRIDE
            k_place = keys + base + (lane[None, :] * TOKEN_STRIDE + column[:, None])
            v_place = values + base + (lane[:, None] * TOKEN_STRIDE + column[None, :])
            scales = base + (TOKENS_PER_BLOCK * HEAD_DIM - (start % TOKENS_PER_BLOCK) * (TOKEN_STRIDE - 2)) + lane * 2
            block = tl.load(table + tl.minimum((start + BLOCK_N) // TOKENS_PER_BLOCK, last_block))
        else:
            offset = block.to(tl.int64) * block_stride + (key % TOKENS_PER_BLOCK) * TOKEN_STRIDE
            k_place = keys + offset[None, :] + column[:, None]
            v_place = values + offset[:, None] + column[None, :]
            scales = offset + (TOKENS_PER_BLOCK * HEAD_DIM - (key % TOKENS_PER_BLOCK) * (TOKEN_STRIDE - 2))
            block = tl.load(table + tl.minimum((key + BLOCK_N) // TOKENS_PER_BLOCK, last_block))
        # Slots past the row's last token may hold anything, NaN included: a weight of 0 would not hide that.
        v_mask = inside[:, None]
        if HEAD_DIM < BLOCK_DIM:
            v_mask = v_mask & (column[None, :] < HEAD_DIM)
            k = tl.load(k_place, mask=column[:, None] < HEAD_DIM, other=0)
        else:
            k = tl.load(k_place)
        score = tl.dot(q, read_keys(k, q.dtype, KV), input_precision="ieee")
        score = scale_scores(score, factors, keys + scales, inside, KV)
        factor = scale_log2 if KV == "plain" else 1.0
        if HAS_SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (factor * 2.885390081777927)) + 1.0))
            factor = 1.0
        visible = inside
        if WINDOW > 0:
            visible = visible & (key >= seen)
        score = tl.where(visible[None, :], score, float("-inf"))
        # An item's first tile holds a key that the query sees, so this is finite from then on.
        now_most = tl.maximum(most, tl.max(score, axis=1) * factor)
        p = tl.exp2(score * factor - now_most[:, None])
        shrink = tl.exp2(most - now_most)
        total = total * shrink[:, None] + p
        v = tl.load(v_place, mask=v_mask, other=0)
        v, p = read_values(v, p, values + scales, inside, q.dtype, KV)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        most = now_most
    return acc, tl.sum(total, axis=1), most


@triton.jit(do_not_specialize_on_alignment=["block_table", "table_stride"])
def decode_kernel(
    q,
    cache,
    kv_scale,
    out,
    partial,
    partial_lse,
    items,
    share_items,
    block_table,
    scale_log2,
    softcap,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    num_q_heads,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RECORD: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    first_item = tl.load(share_items + share)
    last_item = tl.load(share_items + share + 1)
    row, query_row, begin, end, seen, is_all = load_item(items, first_item, RECORD)
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + lane
    column = tl.arange(0, BLOCK_DIM)
    there = (lane < GROUP_SIZE)[:, None] & (column[None, :] < HEAD_DIM)
    keys = cache + kv_head.to(tl.int64) * head_stride
    values = keys + kv_stride
    # The plan and the block tables are older than the kernel before this one: see `paged_decode`.
    if PDL:
        gdc_wait()
    for item in tl.range(first_item, last_item):
        next_row, next_query_row, next_begin, next_end, next_seen, next_is_all = load_item(items, item + 1, RECORD)
        q_offset = (query_row.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + column[None, :]
        query, factors, value_scale = prepare_query(
            tl.load(q + q_offset, mask=there, other=0.0), scale_log2, kv_scale, kv_head, tl.num_programs(0),
            cache.dtype.element_ty, KV,
        )  # fmt: skip
        acc, total, most = attend_item(
            query, factors, keys, values, block_table + row.to(tl.int64) * table_stride, block_stride,
            begin, end, seen, scale_log2, softcap, HEAD_DIM, TOKEN_STRIDE, BLOCK_M, BLOCK_DIM, BLOCK_N,
            TOKENS_PER_BLOCK, WINDOW, HAS_SOFTCAP, KV,
        )  # fmt: skip
        result = acc / total[:, None] * value_scale
        if is_all != 0:
            target = (query_row.to(tl.int64) * out_token_stride + head * HEAD_DIM)[:, None] + column[None, :]
            tl.store(out + target, result.to(out.dtype.element_ty), mask=there)
        else:
            item_head = (item * num_q_heads + head).to(tl.int64)
            tl.store(partial + item_head[:, None] * HEAD_DIM + column[None, :], result, mask=there)
            tl.store(partial_lse + item_head, most + tl.log2(total), mask=lane < GROUP_SIZE)
        row = next_row
        query_row = next_query_row
        begin = next_begin
        end = next_end
        seen = next_seen
        is_all = next_is_all


@triton.jit
def reduce_kernel(
    partial,
    partial_lse,
    out,
    row_items,
    items,
    out_token_stride,
    num_q_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put a row's items together; a row of one is already written, one of none is not decode's."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(row_items + row)
    last = tl.load(row_items + row + 1)
    query_row = tl.load(items + first * RECORD + 1).to(tl.int64)
    if PDL:
        gdc_wait()
    if last - first <= 1:
        return
    column = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, BLOCK_ITEMS)
    acc = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    total = 0.0
    most = float("-inf")
    for start in tl.range(first, last, BLOCK_ITEMS):
        item = start + lane
        source = item.to(tl.int64) * num_q_heads + head
        lse = tl.load(partial_lse + source, mask=item < last, other=float("-inf"))
        there = (item < last)[:, None] & (column[None, :] < HEAD_DIM)
        value = tl.load(partial + source[:, None] * HEAD_DIM + column[None, :], mask=there, other=0.0)
        now_most = tl.maximum(most, tl.max(lse, axis=0))
        weight = tl.exp2(lse - now_most)
        shrink = tl.exp2(most - now_most)
        acc = acc * shrink + tl.sum(value * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        most = now_most
    result = acc / total
    target = out + query_row * out_token_stride + head * HEAD_DIM + column
    tl.store(target, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    plan: DecodePlan,
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: Tile | None = None,
    kv_scale: Tensor | None = None,
) -> None:
    """Attend the plan's rows, and write their places in `out`. Tensors as `paged_prefill` takes them."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, tokens_per_block = kv_cache.shape[2:4]
    group_size = num_q_heads // num_kv_heads
    if tile is None:
        tile = decode_tile(head_dim, multiplied_size(kv_cache.dtype, q.dtype), group_size, shared_memory(q.device))
    scale_log2, cap = softmax_scale(scale, softcap)
    *strides, token_stride = cache_strides(kv_cache)
    decode_kernel[(num_kv_heads, plan.num_shares)](
        q,
        kv_cache,
        out if kv_scale is None else kv_scale,
        out,
        plan.partial,
        plan.partial_lse,
        plan.items,
        plan.share_items,
        block_table,
        scale_log2,
        cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        *strides,
        block_table.stride(0),
        num_q_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        TOKEN_STRIDE=token_stride,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        TOKENS_PER_BLOCK=tokens_per_block,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        RECORD=RECORD,
        KV=kv_kind(kv_cache),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(q.device),
    )
    few_items = plan.num_shares <= FEW_ITEMS * plan.num_rows
    reduce_kernel[(plan.num_rows, num_q_heads)](
        plan.partial,
        plan.partial_lse,
        out,
        plan.rows,
        plan.items,
        out.stride(0),
        num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_ITEMS=FEW_ITEMS if few_items else 4 * FEW_ITEMS,
        RECORD=RECORD,
        num_warps=1 if few_items else 4,
        **pdl(q.device),
    )
