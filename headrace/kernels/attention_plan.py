# SPDX-License-Identifier: Apache-2.0
"""Triton: how the keys of a step's decode rows are shared out over programs.

A plan, made on the device once a step, lays the rows' keys end to end and cuts them into as many equal shares as
programs run at one time, however uneven the rows are. A share holds pieces of one row or more, its items. Its buffers
follow the number of rows alone, never their lengths, so a captured graph stays right.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_tile import Tile, programs_per_multiprocessor, shared_memory

UNIT = 32
"""Keys by which shares are counted; a multiple of every decode tile."""

FEW_ROWS = 8
"""Up to so many rows half the shares are as fast, for a row has half the items to reduce (14 us against 15 for 8 rows
of 1,100 tokens or one of 8,000 on an H200)."""

# Two sizes for all batches up to the second, so that few batches compile the kernel anew.
PLAN_ROWS = (64, 1024)
PLAN_ITEMS = 32

RECORD = 8
"""int32 values of an item: row, query's place, first key, end of keys, first key the query sees, whether it is all."""


@dataclass(slots=True)
class DecodePlan:
    """A step's decode rows cut into items, and room for the items' results. Shared by layers of one shape."""

    num_rows: int
    num_shares: int
    num_items: int
    """At least the items there are."""
    items: Tensor
    """int32 [num_items + 1, RECORD]."""
    share_items: Tensor
    """int32 [num_shares + 1]: each share's first item, and the number of items."""
    rows: Tensor
    """int32 [2, num_rows + 1]: each row's first item, and the number of items; likewise its units."""
    partial: Tensor
    """fp32 [num_items, num_q_heads, head_dim]."""
    partial_lse: Tensor
    """fp32 [num_items, num_q_heads]: log2 of the sum of exp2 of the item's scores."""


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_shares"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def plan_kernel(
    query_start_loc,
    seq_lens,
    items,
    share_items,
    row_items,
    row_units,
    num_rows,
    num_items,
    num_shares,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    inside = row < num_rows
    length = tl.load(seq_lens + row, mask=inside, other=0)
    begin = tl.load(query_start_loc + row, mask=inside, other=0)
    end = tl.load(query_start_loc + row + 1, mask=inside, other=0)
    units = tl.where(end - begin == 1, tl.cdiv(length, UNIT), 0)
    if WINDOW > 0:
        units -= tl.where(units > 0, tl.maximum(length - WINDOW, 0) // UNIT, 0)
    last_unit = tl.cumsum(units, axis=0)
    first_unit = last_unit - units
    share = tl.maximum(tl.cdiv(tl.sum(units, axis=0), num_shares), 1)
    first_share = first_unit // share
    count = tl.where(units > 0, (last_unit - 1) // share - first_share + 1, 0)
    last_item = tl.cumsum(count, axis=0)
    # Every program writes the same here, and reads back only what it wrote.
    tl.store(row_items + row, last_item - count, mask=inside)
    tl.store(row_units + row, first_unit, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(row_items + num_rows, tl.sum(count, axis=0))
        tl.store(row_units + num_rows, tl.sum(units, axis=0))

    place = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    before = place[:, None] - first_share[None, :]
    before = tl.minimum(tl.maximum(before, 0), count[None, :])
    tl.store(share_items + place, tl.sum(before, axis=1), mask=place <= num_shares)

    found = tl.sum((last_item[None, :] <= place[:, None]).to(tl.int32), axis=1)
    real = found < num_rows
    tl.debug_barrier()
    item_length = tl.load(seq_lens + found, mask=real, other=0)
    query = tl.load(query_start_loc + found, mask=real, other=0)
    row_first = tl.load(row_units + found, mask=real, other=0)
    nth = place - tl.load(row_items + found, mask=real, other=0)
    seen = tl.maximum(item_length - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(item_length)
    base = seen // UNIT
    row_end = row_first + tl.cdiv(item_length, UNIT) - base
    of_share = row_first // share + nth
    unit = tl.maximum(of_share * share, row_first)
    unit_end = tl.minimum((of_share + 1) * share, row_end)
    is_all = (unit == row_first) & (unit_end == row_end)
    record = items + place * RECORD
    kept = place < num_items
    tl.store(record, tl.where(real, found, 0), mask=kept)
    tl.store(record + 1, query, mask=kept)
    tl.store(record + 2, (unit - row_first + base) * UNIT, mask=kept)
    tl.store(record + 3, tl.minimum((unit_end - row_first + base) * UNIT, item_length), mask=kept)
    tl.store(record + 4, seen, mask=kept)
    tl.store(record + 5, is_all.to(tl.int32), mask=kept)


def num_programs(device: torch.device, tile: Tile, head_dim: int, element_size: int) -> int:
    """Decode programs that run at one time on a device; a handful on the CPU (the interpreter).

    No more, for the last would then run alone in a second wave.
    """
    if device.type != "cuda":
        return 16
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * programs_per_multiprocessor(tile, head_dim, element_size, shared_memory(device))


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

    query_start_loc: int32 [rows + 1]. seq_lens: int32 [rows]. programs: how many run at one time (`num_programs`).
    """
    device = seq_lens.device
    num_shares = max(programs // num_kv_heads // (2 if num_rows <= FEW_ROWS else 1), 1)
    num_items = num_rows + num_shares
    plan = DecodePlan(
        num_rows,
        num_shares,
        num_items,
        torch.empty(num_items + 1, RECORD, dtype=torch.int32, device=device),
        torch.empty(num_shares + 1, dtype=torch.int32, device=device),
        torch.empty(2, num_rows + 1, dtype=torch.int32, device=device),
        torch.empty(num_items, num_q_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(num_items, num_q_heads, dtype=torch.float32, device=device),
    )
    plan_kernel[(triton.cdiv(num_items + 1, PLAN_ITEMS),)](
        query_start_loc,
        seq_lens,
        plan.items,
        plan.share_items,
        plan.rows[0],
        plan.rows[1],
        num_rows,
        num_items + 1,
        num_shares,
        WINDOW=window or 0,
        UNIT=UNIT,
        RECORD=RECORD,
        BLOCK_ROWS=PLAN_ROWS[0] if num_rows <= PLAN_ROWS[0] else max(triton.next_power_of_2(num_rows), PLAN_ROWS[1]),
        BLOCK_ITEMS=PLAN_ITEMS,
        num_warps=8,
    )
    # A launch that is not dependent lies between the plan and its readers, so that they need not wait to read it.
    plan.share_items[num_shares:].clamp_(min=0)
    return plan
