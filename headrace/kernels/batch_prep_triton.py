# SPDX-License-Identifier: Apache-2.0
"""Triton: a step's tensors out of the request rows, each op one launch."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.batch_prep import WRITE_WORDS

BLOCK = 1024


@triton.jit
def apply_writes_kernel(state, staged, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    record = staged + tl.program_id(0) * RECORD
    low = tl.load(record).to(tl.int64) & 0xFFFFFFFF
    target = (tl.load(record + 1).to(tl.int64) << 32) | low
    source = tl.load(record + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(record + 3)
    value = tl.load(staged + source + at, mask=inside)
    tl.store(state + target + at, value, mask=inside)


def apply_writes(state: Tensor, staged: Tensor, num_writes: int, max_len: int) -> Tensor:
    """See `kernels.batch_prep.apply_writes`."""
    grid = (num_writes, triton.cdiv(max_len, BLOCK))
    apply_writes_kernel[grid](state, staged, RECORD=WRITE_WORDS, BLOCK=BLOCK)
    return state


@triton.jit(do_not_specialize=["num_rows", "padded_tokens"])
def gather_tokens_kernel(
    rows,
    query_start_loc,
    num_computed_tokens,
    token_ids,
    input_ids,
    positions,
    seq_lens,
    num_rows,
    padded_tokens,
    computed_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    # One program per (row, part); those after the last row's write the padding.
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if index < num_rows:
        row = tl.load(rows + index).to(tl.int64)
        first = tl.load(query_start_loc + index)
        count = tl.load(query_start_loc + index + 1) - first
        computed = tl.load(num_computed_tokens + row * computed_stride, mask=row >= 0, other=0)
        inside = at < count
        token = tl.load(token_ids + row * token_stride + computed + at, mask=inside, other=0)
        tl.store(input_ids + first + at, token.to(tl.int64), mask=inside)
        tl.store(positions + first + at, (computed + at).to(tl.int64), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(seq_lens + index, computed + count)
    else:
        nothing = tl.zeros((BLOCK,), tl.int64)
        at += tl.load(query_start_loc + num_rows)
        tl.store(input_ids + at, nothing, mask=at < padded_tokens)
        tl.store(positions + at, nothing, mask=at < padded_tokens)


def gather_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    token_ids: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.batch_prep.gather_tokens`; padding is at most `max_query_len` or BLOCK tokens."""
    num_rows = rows.shape[0]
    gather_tokens_kernel[(num_rows + 1, triton.cdiv(max_query_len, BLOCK))](
        rows,
        query_start_loc,
        num_computed_tokens,
        token_ids,
        input_ids,
        positions,
        seq_lens,
        num_rows,
        input_ids.shape[0],
        num_computed_tokens.stride(0),
        token_ids.stride(0),
        BLOCK=BLOCK,
    )
    return input_ids, positions, seq_lens


@triton.jit(do_not_specialize=["num_rows", "width", "padded_tokens"])
def gather_blocks_kernel(
    rows,
    query_start_loc,
    positions,
    seq_lens,
    block_table,
    slot_mapping,
    tables,
    num_rows,
    width,
    padded_tokens,
    block_table_stride,
    tables_stride,
    TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per (row, part): the part of its slots and of its table; those after the last row's are padding's.
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if index < num_rows:
        row = tl.load(rows + index).to(tl.int64)
        table = block_table + row * block_table_stride
        inside_table = (at * TOKENS_PER_BLOCK < tl.load(seq_lens + index)) & (at < width)
        block = tl.load(table + at, mask=inside_table, other=0)
        tl.store(tables + index * tables_stride + at, block, mask=inside_table)
        first = tl.load(query_start_loc + index)
        inside = at < tl.load(query_start_loc + index + 1) - first
        position = tl.load(positions + first + at, mask=inside, other=0)
        block = tl.load(table + position // TOKENS_PER_BLOCK, mask=inside, other=0).to(tl.int64)
        slot = block * TOKENS_PER_BLOCK + position % TOKENS_PER_BLOCK
        tl.store(slot_mapping + first + at, slot, mask=inside)
    else:
        nowhere = tl.full((BLOCK,), -1, tl.int64)
        at += tl.load(query_start_loc + num_rows)
        tl.store(slot_mapping + at, nowhere, mask=at < padded_tokens)


def gather_blocks(
    rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tokens_per_block: int,
    max_query_len: int,
    slot_mapping: Tensor,
    tables: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels.batch_prep.gather_blocks`; padding is at most `max_query_len` or BLOCK tokens."""
    num_rows, width = rows.shape[0], tables.shape[1]
    gather_blocks_kernel[(num_rows + 1, triton.cdiv(max(max_query_len, width), BLOCK))](
        rows,
        query_start_loc,
        positions,
        seq_lens,
        block_table,
        slot_mapping,
        tables,
        num_rows,
        width,
        slot_mapping.shape[0],
        block_table.stride(0),
        tables.stride(0),
        TOKENS_PER_BLOCK=tokens_per_block,
        BLOCK=BLOCK,
    )
    return slot_mapping, tables


@triton.jit(do_not_specialize=["num_rows"])
def advance_rows_kernel(rows, query_start_loc, num_computed_tokens, num_rows, computed_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < num_rows, other=-1).to(tl.int64)
    there = row >= 0
    first = tl.load(query_start_loc + at, mask=there, other=0)
    count = tl.load(query_start_loc + at + 1, mask=there, other=0) - first
    computed = num_computed_tokens + row * computed_stride
    tl.store(computed, tl.load(computed, mask=there, other=0) + count, mask=there)


def advance_rows(rows: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor) -> Tensor:
    """See `kernels.batch_prep.advance_rows`."""
    num_rows = rows.shape[0]
    advance_rows_kernel[(triton.cdiv(num_rows, BLOCK),)](
        rows, query_start_loc, num_computed_tokens, num_rows, num_computed_tokens.stride(0), BLOCK=BLOCK
    )
    return num_computed_tokens


@triton.jit
def store_token(row, token, num_tokens, token_ids, num_tokens_stride, token_stride, capacity):
    """A sampled token becomes its row's newest; row < 0 is padding."""
    there = row >= 0
    row = row.to(tl.int64)
    known = tl.load(num_tokens + row * num_tokens_stride, mask=there, other=0)
    # A write past a row's end would be its neighbour's first token.
    target = token_ids + row * token_stride + known
    tl.store(target, tl.maximum(token, 0).to(tl.int32), mask=there & (known < capacity))
    tl.store(num_tokens + row * num_tokens_stride, known + 1, mask=there)


@triton.jit(do_not_specialize=["num_sampled", "capacity"])
def store_tokens_kernel(
    sample_rows,
    sampled,
    num_tokens,
    token_ids,
    num_sampled,
    capacity,
    num_tokens_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(sample_rows + at, mask=at < num_sampled, other=-1)
    token = tl.load(sampled + at, mask=at < num_sampled, other=0)
    store_token(row, token, num_tokens, token_ids, num_tokens_stride, token_stride, capacity)


def store_tokens(sample_rows: Tensor, sampled: Tensor, num_tokens: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.batch_prep.store_tokens`."""
    num_sampled = sample_rows.shape[0]
    store_tokens_kernel[(triton.cdiv(num_sampled, BLOCK),)](
        sample_rows,
        sampled,
        num_tokens,
        token_ids,
        num_sampled,
        token_ids.shape[1],
        num_tokens.stride(0),
        token_ids.stride(0),
        BLOCK=BLOCK,
    )
    return num_tokens, token_ids
