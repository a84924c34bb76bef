# SPDX-License-Identifier: Apache-2.0
"""Triton: attention of rows with one new token each over their paged KV, split over the keys and put together again.

A plan, made on the device once a step, cuts the rows' keys into items of one size, so that all rows together make about
as many items as the GPU holds programs, however uneven they are. Every layer then runs one program per item and KV head
and one small reduction. Grids follow the number of rows alone, never their lengths, so a captured graph stays right.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_tile import (
    Tile,
    attend_range,
    block_dim,
    cache_strides,
    decode_tile,
    shared_memory,
    softmax_scale,
)
from headrace.kernels.pdl import pdl, wait_for_previous

PROGRAMS_PER_SM = 8
"""Programs the plan aims at, over all KV heads: two or three fit at a time, and several waves even out the tails."""

MIN_CHUNK = 64
"""Keys of the smallest item; chunks are multiples of it."""

# One size for all batches up to it, so that none compiles the kernel anew.
PLAN_ROWS = 1024
PLAN_ITEMS = 32
REDUCE_ITEMS = 16


@dataclass(slots=True)
class DecodePlan:
    """A step's decode rows cut into items, and room for the items' results. Shared by layers of one shape."""

    num_rows: int
    num_items: int
    """At least the items there are."""
    item_row: Tensor
    """int32 [num_items]: the row of each item; -1 past the last."""
    row_items: Tensor
    """int32 [num_rows + 2]: each row's first item, the number of items, and the keys of an item."""
    partial: Tensor
    """fp32 [num_items, num_q_heads, head_dim]."""
    partial_lse: Tensor
    """fp32 [num_items, num_q_heads]: log2 of the sum of exp2 of the item's scores."""


@triton.jit(do_not_specialize=["num_rows", "num_items"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens"])
def plan_kernel(
    query_start_loc,
    seq_lens,
    item_row,
    row_items,
    num_rows,
    num_items,
    target,
    WINDOW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    length = tl.load(seq_lens + row, mask=row < num_rows, other=0)
    begin = tl.load(query_start_loc + row, mask=row < num_rows, other=0)
    end = tl.load(query_start_loc + row + 1, mask=row < num_rows, other=0)
    length = tl.where(end - begin == 1, length, 0)
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    chunk = tl.cdiv(tl.cdiv(tl.sum(length.to(tl.int64), axis=0), target), MIN_CHUNK) * MIN_CHUNK
    chunk = tl.maximum(chunk, MIN_CHUNK).to(tl.int32)
    count = (length + chunk - 1) // chunk
    last = tl.cumsum(count, axis=0)
    item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    found = tl.sum((last[None, :] <= item[:, None]).to(tl.int32), axis=1)
    tl.store(item_row + item, tl.where(found < num_rows, found, -1), mask=item < num_items)
    if tl.program_id(0) == 0:
        tl.store(row_items + row, last - count, mask=row < num_rows)
        tl.store(row_items + num_rows, tl.sum(count, axis=0))
        tl.store(row_items + num_rows + 1, chunk)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "table_stride"],
)
def decode_kernel(
    q,
    cache,
    out,
    partial,
    partial_lse,
    item_row,
    row_items,
    block_table,
    query_start_loc,
    seq_lens,
    scale_log2,
    softcap,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    table_stride,
    num_rows,
    num_q_heads,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(item_row + item)
    if row < 0:
        return
    first_item = tl.load(row_items + row)
    num_row_items = tl.load(row_items + row + 1) - first_item
    chunk = tl.load(row_items + num_rows + 1)
    seq_len = tl.load(seq_lens + row)
    begin = (item - first_item) * chunk
    if WINDOW > 0:
        begin += tl.maximum(seq_len - WINDOW, 0)
    end = tl.minimum(begin + chunk, seq_len)
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + lane
    column = tl.arange(0, BLOCK_DIM)
    there = (lane < GROUP_SIZE)[:, None] & (column[None, :] < HEAD_DIM)
    query_row = tl.load(query_start_loc + row).to(tl.int64)
    q_offset = (query_row * q_token_stride + head * q_head_stride)[:, None] + column[None, :]
    query = tl.load(q + q_offset, mask=there, other=0.0).to(cache.dtype.element_ty)

    keys = cache + kv_head.to(tl.int64) * head_stride
    values = keys + kv_stride
    table = block_table + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    # The range starts inside the window, so one position serves all lanes and no window is left to mask.
    position = tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    acc, total, most = attend_range(
        acc, total, most, query, keys, values, table, block_stride, token_stride, begin, whole, position,
        scale_log2, softcap, HEAD_DIM, BLOCK_DIM, BLOCK_N, TOKENS_PER_BLOCK, 0, HAS_SOFTCAP, False,
    )  # fmt: skip
    acc, total, most = attend_range(
        acc, total, most, query, keys, values, table, block_stride, token_stride, whole, end, position,
        scale_log2, softcap, HEAD_DIM, BLOCK_DIM, BLOCK_N, TOKENS_PER_BLOCK, 0, HAS_SOFTCAP, True,
    )  # fmt: skip
    result = acc / total[:, None]
    if num_row_items == 1:
        target = (query_row * out_token_stride + head * HEAD_DIM)[:, None] + column[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=there)
    else:
        item_head = item.to(tl.int64) * num_q_heads + head
        tl.store(partial + item_head[:, None] * HEAD_DIM + column[None, :], result, mask=there)
        tl.store(partial_lse + item_head, most + tl.log2(total), mask=lane < GROUP_SIZE)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc"])
def reduce_kernel(
    partial,
    partial_lse,
    out,
    row_items,
    query_start_loc,
    out_token_stride,
    num_q_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put a row's items together; a row of one is already written, one of none is not decode's."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(row_items + row)
    last = tl.load(row_items + row + 1)
    query_row = tl.load(query_start_loc + row).to(tl.int64)
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


def num_programs(device: torch.device) -> int:
    """Programs that fill a device; a handful on the CPU (the interpreter)."""
    if device.type != "cuda":
        return 16
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def plan_decode(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_rows: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    programs: int,
) -> DecodePlan:
    """Cut those of the first num_rows rows that have one new token into items.

    query_start_loc: int32 [rows + 1]. seq_lens: int32 [rows]. programs: how many to aim at (`num_programs`).
    """
    device = seq_lens.device
    target = max(programs // num_kv_heads, 1)
    num_items = num_rows + target
    plan = DecodePlan(
        num_rows,
        num_items,
        torch.empty(num_items, dtype=torch.int32, device=device),
        torch.empty(num_rows + 2, dtype=torch.int32, device=device),
        torch.empty(num_items, num_q_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(num_items, num_q_heads, dtype=torch.float32, device=device),
    )
    plan_kernel[(triton.cdiv(num_items, PLAN_ITEMS),)](
        query_start_loc,
        seq_lens,
        plan.item_row,
        plan.row_items,
        num_rows,
        num_items,
        target,
        WINDOW=window or 0,
        MIN_CHUNK=MIN_CHUNK,
        BLOCK_ROWS=max(triton.next_power_of_2(num_rows), PLAN_ROWS),
        BLOCK_ITEMS=PLAN_ITEMS,
        num_warps=8,
    )
    return plan


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    plan: DecodePlan,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: Tile | None = None,
) -> None:
    """Attend the plan's rows, and write their places in `out`. Tensors as `paged_prefill` takes them."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, tokens_per_block = kv_cache.shape[2:4]
    group_size = num_q_heads // num_kv_heads
    if tile is None:
        tile = decode_tile(head_dim, kv_cache.element_size(), group_size, shared_memory(q.device))
    scale_log2, cap = softmax_scale(scale, softcap)
    decode_kernel[(num_kv_heads, plan.num_items)](
        q,
        kv_cache,
        out,
        plan.partial,
        plan.partial_lse,
        plan.item_row,
        plan.row_items,
        block_table,
        query_start_loc,
        seq_lens,
        scale_log2,
        cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        *cache_strides(kv_cache),
        block_table.stride(0),
        plan.num_rows,
        num_q_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        TOKENS_PER_BLOCK=tokens_per_block,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(q.device),
    )
    reduce_kernel[(plan.num_rows, num_q_heads)](
        plan.partial,
        plan.partial_lse,
        out,
        plan.row_items,
        query_start_loc,
        out.stride(0),
        num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_ITEMS=REDUCE_ITEMS,
        num_warps=4,
        **pdl(q.device),
    )
