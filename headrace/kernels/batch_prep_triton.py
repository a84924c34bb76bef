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


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "padded_tokens", "padded_rows"])
def gather_tokens_kernel(
    rows,
    query_start_loc,
    num_computed_tokens,
    token_ids,
    input_ids,
    positions,
    seq_lens,
    num_rows,
    num_tokens,
    padded_tokens,
    padded_rows,
    computed_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    # The program after the last row's writes the padding.
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if index < num_rows:
        row = tl.load(rows + index).to(tl.int64)
        first = tl.load(query_start_loc + index)
        count = tl.load(query_start_loc + index + 1) - first
        computed = tl.load(num_computed_tokens + row * computed_stride)
        inside = at < count
        token = tl.load(token_ids + row * token_stride + computed + at, mask=inside, other=0)
        tl.store(input_ids + first + at, token.to(tl.int64), mask=inside)
        tl.store(positions + first + at, (computed + at).to(tl.int64), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(seq_lens + index, computed + count)
    else:
        nothing = tl.zeros((BLOCK,), tl.int64)
        tl.store(input_ids + num_tokens + at, nothing, mask=num_tokens + at < padded_tokens)
        tl.store(positions + num_tokens + at, nothing, mask=num_tokens + at < padded_tokens)
        tl.store(seq_lens + num_rows + at, nothing.to(tl.int32), mask=num_rows + at < padded_rows)


def gather_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    token_ids: Tensor,
    num_tokens: int,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.batch_prep.gather_tokens`."""
    num_rows, padded_tokens, padded_rows = rows.shape[0], input_ids.shape[0], seq_lens.shape[0]
    padding = max(padded_tokens - num_tokens, padded_rows - num_rows)
    grid = (num_rows + (padding > 0), triton.cdiv(max(max_query_len, padding), BLOCK))
    gather_tokens_kernel[grid](
        rows,
        query_start_loc,
        num_computed_tokens,
        token_ids,
        input_ids,
        positions,
        seq_lens,
        num_rows,
        num_tokens,
        padded_tokens,
        padded_rows,
        num_computed_tokens.stride(0),
        token_ids.stride(0),
        BLOCK=BLOCK,
    )
    return input_ids, positions, seq_lens


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "width", "padded_tokens", "padded_rows"])
def gather_blocks_kernel(
    rows,
    query_start_loc,
    positions,
    block_table,
    slot_mapping,
    tables,
    num_rows,
    num_tokens,
    width,
    padded_tokens,
    padded_rows,
    block_table_stride,
    tables_stride,
    TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per (row, part): the part of its slots and of its table; those after the last row's are padding's.
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_table = at < width
    if index < num_rows:
        row = tl.load(rows + index).to(tl.int64)
        table = block_table + row * block_table_stride
        block = tl.load(table + at, mask=inside_table, other=0)
        tl.store(tables + index * tables_stride + at, block, mask=inside_table)
        first = tl.load(query_start_loc + index)
        inside = at < tl.load(query_start_loc + index + 1) - first
        position = tl.load(positions + first + at, mask=inside, other=0)
        block = tl.load(table + position // TOKENS_PER_BLOCK, mask=inside, other=0).to(tl.int64)
        slot = block * TOKENS_PER_BLOCK + position % TOKENS_PER_BLOCK
        tl.store(slot_mapping + first + at, slot, mask=inside)
    else:
        if index < padded_rows:
            tl.store(tables + index * tables_stride + at, tl.zeros((BLOCK,), tl.int32), mask=inside_table)
        if index == num_rows:
            nowhere = tl.full((BLOCK,), -1, tl.int64)
            tl.store(slot_mapping + num_tokens + at, nowhere, mask=num_tokens + at < padded_tokens)


def gather_blocks(
    rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    tokens_per_block: int,
    num_tokens: int,
    max_query_len: int,
    slot_mapping: Tensor,
    tables: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels.batch_prep.gather_blocks`."""
    num_rows, width = rows.shape[0], tables.shape[1]
    padded_tokens, padded_rows = slot_mapping.shape[0], tables.shape[0]
    num_programs = max(padded_rows, num_rows + (padded_tokens > num_tokens))
    longest = max(max_query_len, width, padded_tokens - num_tokens)
    gather_blocks_kernel[(num_programs, triton.cdiv(longest, BLOCK))](
        rows,
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        tables,
        num_rows,
        num_tokens,
        width,
        padded_tokens,
        padded_rows,
        block_table.stride(0),
        tables.stride(0),
        TOKENS_PER_BLOCK=tokens_per_block,
        BLOCK=BLOCK,
    )
    return slot_mapping, tables


@triton.jit(do_not_specialize=["num_rows", "num_sampled", "capacity"])
def commit_step_kernel(
    rows,
    query_start_loc,
    sample_rows,
    sampled,
    num_computed_tokens,
    num_tokens,
    token_ids,
    num_rows,
    num_sampled,
    capacity,
    computed_stride,
    num_tokens_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scheduled = at < num_rows
    row = tl.load(rows + at, mask=scheduled, other=0).to(tl.int64)
    first = tl.load(query_start_loc + at, mask=scheduled, other=0)
    count = tl.load(query_start_loc + at + 1, mask=scheduled, other=0) - first
    computed = num_computed_tokens + row * computed_stride
    tl.store(computed, tl.load(computed, mask=scheduled, other=0) + count, mask=scheduled)

    samples = at < num_sampled
    row = tl.load(sample_rows + at, mask=samples, other=0).to(tl.int64)
    token = tl.load(sampled + at, mask=samples, other=0).to(tl.int32)
    known = tl.load(num_tokens + row * num_tokens_stride, mask=samples, other=0)
    # A write past a row's end would be its neighbour's first token.
    target = token_ids + row * token_stride + known
    tl.store(target, tl.maximum(token, 0), mask=samples & (known < capacity))
    tl.store(num_tokens + row * num_tokens_stride, known + 1, mask=samples)


def commit_step(
    rows: Tensor,
    query_start_loc: Tensor,
    sample_rows: Tensor,
    sampled: Tensor,
    num_computed_tokens: Tensor,
    num_tokens: Tensor,
    token_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.batch_prep.commit_step`."""
    num_rows, num_sampled = rows.shape[0], sample_rows.shape[0]
    commit_step_kernel[(triton.cdiv(num_rows, BLOCK),)](
        rows,
        query_start_loc,
        sample_rows,
        sampled,
        num_computed_tokens,
        num_tokens,
        token_ids,
        num_rows,
        num_sampled,
        token_ids.shape[1],
        num_computed_tokens.stride(0),
        num_tokens.stride(0),
        token_ids.stride(0),
        BLOCK=BLOCK,
    )
    return num_computed_tokens, num_tokens, token_ids
