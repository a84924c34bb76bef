# SPDX-License-Identifier: Apache-2.0
"""Triton: a product in one tile for all numbers of rows, by one compiled kernel.

Where the outputs alone make few tiles, the inputs are cut into parts, as many as the weight's shape says. With few rows
each part has a program, and the last to arrive at a tile adds the parts up; with many a program takes all parts of its
tile, one after the other. Either way a part is summed from zero by the same instructions, and the parts are added in
the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.skinny_matrix import MAX_TILES, counters, sum_parts

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 64
# Of fp32, whose tiles take twice the room, half the inputs.
BLOCK_K_FP32 = 32
MIN_PROGRAMS = 256
"""Two a multiprocessor of an H200."""
MAX_SPLIT = 8
NUM_STAGES = 3
GROUP_M = 8
"""Tiles of rows that go through the weight together, so that what they read of it stays in the L2."""


@triton.jit(do_not_specialize=["num_rows", "num_tiles_m", "parts_each"])
def fixed_tile_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    x_stride,
    out_stride,
    num_rows,
    in_features,
    out_features,
    num_tiles_m,
    parts_each,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    GROUP_M: tl.constexpr,
    K_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of out, of `parts_each` of the SPLIT parts of the inputs: one or all."""
    tile = tl.program_id(0)
    num_tiles_n = tl.cdiv(out_features, BLOCK_N)
    group = tile // (GROUP_M * num_tiles_n)
    group_rows = tl.minimum(num_tiles_m - group * GROUP_M, GROUP_M)
    in_group = tile % (GROUP_M * num_tiles_n)
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    m = (group * GROUP_M + in_group % group_rows) * BLOCK_M + local_m
    n = in_group // group_rows * BLOCK_N + local_n
    # Rows past the end read the last one again; nothing of theirs is kept.
    x_rows = x + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * x_stride
    columns = weight + tl.minimum(n, out_features - 1).to(tl.int64)[None, :] * in_features
    lane = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1) * parts_each
    for part in tl.range(first, first + parts_each):
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(part * PART, tl.minimum((part + 1) * PART, in_features), BLOCK_K):
            k = start + lane
            if K_EVEN:
                left = tl.load(x_rows + k[None, :])
                right = tl.load(columns + k[:, None])
            else:
                left = tl.load(x_rows + k[None, :], mask=(k < in_features)[None, :], other=0.0)
                right = tl.load(columns + k[:, None], mask=(k < in_features)[:, None], other=0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        total += acc
    is_last = True
    if parts_each < SPLIT:
        parts = partial + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N)
        tile_at = local_m[:, None] * BLOCK_N + local_n[None, :]
        is_last, total = sum_parts(parts, counters + tile, tile_at, total, SPLIT, BLOCK_M * BLOCK_N)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
        target = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
        there = (m < num_rows)[:, None] & (n < out_features)[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=there)


def num_parts(in_features: int, out_features: int, block_k: int) -> int:
    """Into how many parts the inputs are cut: a property of the weight alone."""
    tiles, split = triton.cdiv(out_features, BLOCK_N), 1
    while tiles * split < MIN_PROGRAMS and split < MAX_SPLIT and in_features >= 2 * split * 4 * block_k:
        split *= 2
    return split


def fixed_tile_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `kernels.fixed_tile.fixed_tile_linear`."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    block_k = BLOCK_K_FP32 if x.dtype == torch.float32 else BLOCK_K
    split = num_parts(in_features, out_features, block_k)
    num_tiles_m, num_tiles_n = triton.cdiv(num_rows, BLOCK_M), triton.cdiv(out_features, BLOCK_N)
    num_tiles = num_tiles_m * num_tiles_n
    is_cut = split > 1 and num_tiles < MIN_PROGRAMS and num_tiles <= MAX_TILES
    fixed_tile_kernel[(num_tiles, split if is_cut else 1)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        torch.empty(num_tiles * split * BLOCK_M * BLOCK_N if is_cut else 1, dtype=torch.float32, device=x.device),
        counters(x.device),
        x.stride(0),
        out.stride(0),
        num_rows,
        in_features,
        out_features,
        num_tiles_m,
        1 if is_cut else split,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        SPLIT=split,
        PART=triton.cdiv(triton.cdiv(in_features, split), block_k) * block_k,
        GROUP_M=GROUP_M,
        K_EVEN=in_features % block_k == 0,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return out
