# SPDX-License-Identifier: Apache-2.0
"""Triton: products of one or two rows. A program holds whole rows of the weight, loaded before it waits for the kernel
before it, and multiplies in registers.

Measured on an H200, Qwen3-8B's five shapes, one row: 3.77 ms over 36 layers and the head, the library 4.36. At four
rows this form is bound by the reading of x (5.8 ms): `skinny_matrix.py` has the form for more.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.activation_triton import act_and_mul
from headrace.kernels.pdl import pdl, wait_for_previous
from headrace.kernels.skinny_matrix import multiply

MAX_VECTOR_ROWS = 2
MAX_PARTS = 4
"""Pieces, each a power of two, that a weight row is held in."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program holds of the weight: outputs, and inputs of a piece."""

    block_n: int
    block_k: int
    num_warps: int


@triton.jit
def row_sum(w, x, k, k_begin, in_features, K_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Dot products of rows w [N, BLOCK_K] with one piece of a row of x."""
    if K_EVEN:
        value = tl.load(x + k_begin + k).to(tl.float32)
    else:
        value = tl.load(x + k_begin + k, mask=k_begin + k < in_features, other=0.0).to(tl.float32)
    return tl.sum(w.to(tl.float32) * value[None, :], axis=1)


@triton.jit
def load_rows(weight, n, k, in_features, out_features, K_EVEN: tl.constexpr, N_EVEN: tl.constexpr):
    """Rows n of the weight, columns k: [N, K]."""
    at = weight + n.to(tl.int64)[:, None] * in_features + k[None, :]
    if K_EVEN and N_EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(
        at, mask=(n < out_features)[:, None] & (k < in_features)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit(do_not_specialize=["out_features"])
def vector_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    out_stride,
    in_features,
    out_features,
    NUM_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_EVEN: tl.constexpr,
    N_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of every row of x; gated: of gate and of up, `out_features` apart in the weight."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w0 = load_rows(weight, n, k, in_features, out_features, K_EVEN, N_EVEN)
    w1 = w0
    w2 = w0
    w3 = w0
    if PARTS > 1:
        w1 = load_rows(weight, n, BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
    if PARTS > 2:
        w2 = load_rows(weight, n, 2 * BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
    if PARTS > 3:
        w3 = load_rows(weight, n, 3 * BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
    v0 = w0
    v1 = w0
    v2 = w0
    v3 = w0
    if GATED:
        second = weight + out_features.to(tl.int64) * in_features
        v0 = load_rows(second, n, k, in_features, out_features, K_EVEN, N_EVEN)
        if PARTS > 1:
            v1 = load_rows(second, n, BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
        if PARTS > 2:
            v2 = load_rows(second, n, 2 * BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
        if PARTS > 3:
            v3 = load_rows(second, n, 3 * BLOCK_K + k, in_features, out_features, K_EVEN, N_EVEN)
    wait_for_previous(PDL)
    for row in tl.static_range(NUM_ROWS):
        row_x = x + row * x_stride
        sums = row_sum(w0, row_x, k, 0, in_features, K_EVEN, BLOCK_K)
        if PARTS > 1:
            sums += row_sum(w1, row_x, k, BLOCK_K, in_features, K_EVEN, BLOCK_K)
        if PARTS > 2:
            sums += row_sum(w2, row_x, k, 2 * BLOCK_K, in_features, K_EVEN, BLOCK_K)
        if PARTS > 3:
            sums += row_sum(w3, row_x, k, 3 * BLOCK_K, in_features, K_EVEN, BLOCK_K)
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)
        if GATED:
            ups = row_sum(v0, row_x, k, 0, in_features, K_EVEN, BLOCK_K)
            if PARTS > 1:
                ups += row_sum(v1, row_x, k, BLOCK_K, in_features, K_EVEN, BLOCK_K)
            if PARTS > 2:
                ups += row_sum(v2, row_x, k, 2 * BLOCK_K, in_features, K_EVEN, BLOCK_K)
            if PARTS > 3:
                ups += row_sum(v3, row_x, k, 3 * BLOCK_K, in_features, K_EVEN, BLOCK_K)
            dtype = out.dtype.element_ty
            sums = act_and_mul(sums.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32), IS_GELU)
        tl.store(out + row * out_stride + n, sums.to(out.dtype.element_ty), mask=n < out_features)


def pieces(in_features: int) -> tuple[int, int]:
    """(number of pieces, a power of two each) that waste least of a row of `in_features`."""
    options = []
    for parts in range(1, MAX_PARTS + 1):
        block = max(16, triton.next_power_of_2(triton.cdiv(in_features, parts)))
        options.append((triton.cdiv(in_features, block) * block, parts, block))
    _, parts, block = min(options)
    return triton.cdiv(in_features, block), block


def vector_tile(in_features: int, gated: bool) -> Tile:
    """Two outputs a program measured best, or one of gate and up each, as long as registers hold their rows."""
    parts, block = pieces(in_features)
    held = parts * block * (2 if gated else 1)
    block_n = 2 if held <= 12288 else 1
    return Tile(block_n, block, 4 if gated and held <= 8192 else 8)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gated: bool, is_gelu: bool) -> Tensor:
    """Write out [num_rows, out_features], by either kernel."""
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    if num_rows > MAX_VECTOR_ROWS:
        return multiply(x, weight, bias, out, gated, is_gelu)
    tile = vector_tile(in_features, gated)
    parts = triton.cdiv(in_features, tile.block_k)
    if num_rows:
        vector_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            x.stride(0),
            out.stride(0),
            in_features,
            out_features,
            NUM_ROWS=num_rows,
            PARTS=parts,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            K_EVEN=parts * tile.block_k == in_features,
            N_EVEN=out_features % tile.block_n == 0,
            HAS_BIAS=bias is not None,
            GATED=gated,
            IS_GELU=is_gelu,
            num_warps=tile.num_warps,
            **pdl(x.device),
        )
    return out


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `kernels.skinny.skinny_linear`."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return launch(x, weight, bias, out, False, False)


def skinny_gated(x: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
    """See `kernels.skinny.skinny_gated`."""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    return launch(x, weight, None, out, True, is_gelu)
