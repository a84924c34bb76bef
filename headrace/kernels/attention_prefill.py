# SPDX-License-Identifier: Apache-2.0
"""Triton: causal attention of chunks of new tokens over their rows' paged KV.

A program takes some tokens of one row and all query heads of one KV head, packed as the rows of one product. The grid
is an upper bound from host-side counts; programs find their row on the device and surplus ones return. Rows of one
token are decode's.

For `deterministic` (ALIKE) it takes these as well, and masks every tile of keys: a query then meets each tile by
the same instructions, in the same order, whatever chunk it is in. Tiles that it sees nothing of leave it as it was.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_tile import (
    Tile,
    attend_range,
    block_dim,
    cache_strides,
    multiplied_size,
    prefill_tile,
    prepare_query,
    shared_memory,
    softmax_scale,
)
from headrace.kernels.kv_quant_triton import kv_kind


@triton.jit
def first_tile(query_start_loc, first_row, row, BLOCK_Q: tl.constexpr):
    """The number of a row's first tile: each row gets at least the tiles it needs, and at most one more."""
    return (tl.load(query_start_loc + row) - tl.load(query_start_loc + first_row)) // BLOCK_Q + row - first_row


@triton.jit
def find_row(query_start_loc, first_row, num_rows, tile, BLOCK_Q: tl.constexpr):
    """The last row whose first tile is not after `tile`."""
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(query_start_loc, first_row, middle, BLOCK_Q) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def key_ranges(first_position, last_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, ALIKE: tl.constexpr):
    """begin, all_begin, all_end, end: some query sees keys from begin to end; all do from all_begin to all_end, unless
    all keys are to be taken alike."""
    end = last_position + 1
    all_end = (first_position + 1) // BLOCK_N * BLOCK_N
    begin = 0
    all_begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        all_begin = tl.minimum(tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, end)
        all_end = tl.maximum(all_begin, all_end)
    if ALIKE:
        all_begin = begin
        all_end = begin
    return begin, all_begin, all_end, end


@triton.jit(
    do_not_specialize=["first_row", "num_rows"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "table_stride"],
)
def prefill_kernel(
    q,
    cache,
    kv_scale,
    out,
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
    table_stride,
    first_row,
    num_rows,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
    ALIKE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    kv_head = tl.program_id(0)
    # The last tiles of a row see most keys: they start first, so that no long one is left at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = find_row(query_start_loc, first_row, num_rows, tile, BLOCK_Q)
    query_begin = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_begin
    first_token = (tile - first_tile(query_start_loc, first_row, row, BLOCK_Q)) * BLOCK_Q
    if (first_token >= query_len) | ((query_len <= 1) & (not ALIKE)):
        return
    seq_len = tl.load(seq_lens + row)
    lane = tl.arange(0, BLOCK_M)
    token = first_token + lane // GROUP_SIZE
    head = kv_head * GROUP_SIZE + lane % GROUP_SIZE
    inside = (lane < BLOCK_Q * GROUP_SIZE) & (token < query_len)
    column = tl.arange(0, BLOCK_DIM)
    there = inside[:, None] & (column[None, :] < HEAD_DIM)
    query_row = (query_begin + token).to(tl.int64)
    q_offset = (query_row * q_token_stride + head * q_head_stride)[:, None] + column[None, :]
    query, factors, value_scale = prepare_query(
        tl.load(q + q_offset, mask=there, other=0.0), scale_log2, kv_scale, kv_head, tl.num_programs(0),
        cache.dtype.element_ty, KV,
    )  # fmt: skip
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    # Lanes past the chunk's end stand at its last position, so that they see a key like all others.
    position = tl.minimum(seq_len - query_len + token, last_position)
    begin, all_begin, all_end, end = key_ranges(first_position, last_position, WINDOW, BLOCK_N, ALIKE)
    keys = cache + kv_head.to(tl.int64) * head_stride
    values = keys + kv_stride
    table = block_table + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if WINDOW > 0:
        acc, total, most = attend_range(
            acc, total, most, query, factors, keys, values, table, block_stride, begin, all_begin, position, scale_log2,
            softcap, HEAD_DIM, TOKEN_STRIDE, BLOCK_DIM, BLOCK_N, TOKENS_PER_BLOCK, WINDOW, HAS_SOFTCAP, KV, True,
        )  # fmt: skip
    acc, total, most = attend_range(
        acc, total, most, query, factors, keys, values, table, block_stride, all_begin, all_end, position, scale_log2,
        softcap, HEAD_DIM, TOKEN_STRIDE, BLOCK_DIM, BLOCK_N, TOKENS_PER_BLOCK, WINDOW, HAS_SOFTCAP, KV, False,
    )  # fmt: skip
    acc, total, most = attend_range(
        acc, total, most, query, factors, keys, values, table, block_stride, all_end, end, position, scale_log2,
        softcap, HEAD_DIM, TOKEN_STRIDE, BLOCK_DIM, BLOCK_N, TOKENS_PER_BLOCK, WINDOW, HAS_SOFTCAP, KV, True,
    )  # fmt: skip
    out_offset = (query_row * out_token_stride + head * HEAD_DIM)[:, None] + column[None, :]
    tl.store(out + out_offset, (acc / total[:, None] * value_scale).to(out.dtype.element_ty), mask=there)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    first_row: int,
    num_rows: int,
    num_tokens: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: Tile | None = None,
    kv_scale: Tensor | None = None,
    alike: bool = False,
) -> None:
    """Attend the tokens of rows first_row to num_rows, and write their places in `out`; rows of one token are left out.

    alike: none is left out, and a token's result does not depend on the others of its row and chunk.

    q: [tokens, num_q_heads, head_dim]; out: [tokens, num_q_heads * head_dim]. kv_cache: the layer's view [num_blocks,
    2, num_kv_heads, tokens_per_block, head_dim]. block_table: int32 [rows, max_blocks]; query_start_loc: int32
    [rows + 1]; seq_lens: int32 [rows]. num_tokens: at least the tokens of these rows. window: tokens a query sees.
    kv_scale: fp32 [2, num_kv_heads], an fp8 cache's.
    """
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, tokens_per_block = kv_cache.shape[2:4]
    group_size = num_q_heads // num_kv_heads
    if tile is None:
        tile = prefill_tile(head_dim, multiplied_size(kv_cache.dtype, q.dtype), shared_memory(q.device))
    block_m = max(tile.block_m, triton.next_power_of_2(group_size))
    num_tiles = num_tokens // (block_m // group_size) + num_rows - first_row
    scale_log2, cap = softmax_scale(scale, softcap)
    *strides, token_stride = cache_strides(kv_cache)
    prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        kv_cache,
        out if kv_scale is None else kv_scale,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        scale_log2,
        cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        *strides,
        block_table.stride(0),
        first_row,
        num_rows,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        TOKEN_STRIDE=token_stride,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        TOKENS_PER_BLOCK=tokens_per_block,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        KV=kv_kind(kv_cache),
        ALIKE=alike,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
