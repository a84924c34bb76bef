# SPDX-License-Identifier: Apache-2.0
"""Triton: filters without a sort, the draw, and its random numbers. One program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
GOLDEN = tl.constexpr(-7046029254386353131)


@triton.jit
def mix(x):
    """splitmix64's finaliser; see the reference."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["num_rows"])
def uniforms_kernel(
    seeds, positions, choices, out, num_rows, seed_stride, position_stride, choice_stride, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    seed = tl.load(seeds + at * seed_stride, mask=inside, other=0)
    position = tl.load(positions + at * position_stride, mask=inside, other=0).to(tl.int64)
    choice = tl.load(choices + at * choice_stride, mask=inside, other=0).to(tl.int64)
    keyed = mix(mix(seed + GOLDEN) ^ ((position << 32) | choice))
    bits = (keyed >> 32) & 0xFFFFFFFF
    tl.store(out + at, (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10, mask=inside)


def uniforms(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    """See `kernels.sampling.uniforms`."""
    num_rows = seeds.shape[0]
    out = torch.empty(num_rows, dtype=torch.float64, device=seeds.device)
    strides = seeds.stride(0), positions.stride(0), choices.stride(0)
    uniforms_kernel[(triton.cdiv(num_rows, 256),)](seeds, positions, choices, out, num_rows, *strides, BLOCK=256)
    return out


@triton.jit
def key_of(logits):
    """uint32 that orders as the floats do."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def weight_sums(row, vocab, floor, peak, first, second, third, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens (or how much probability) have keys from each of three on, of those from `floor` on."""
    of_first = tl.zeros((BLOCK,), tl.float32)
    of_second = tl.zeros((BLOCK,), tl.float32)
    of_third = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        key = key_of(score)
        weight = tl.exp(score - peak) if BY_MASS else tl.where(at < vocab, 1.0, 0.0)
        weight = tl.where(key >= floor, weight, 0.0)
        of_first += tl.where(key >= first, weight, 0.0)
        of_second += tl.where(key >= second, weight, 0.0)
        of_third += tl.where(key >= third, weight, 0.0)
    return tl.sum(of_first), tl.sum(of_second), tl.sum(of_third)


@triton.jit
def largest_key(row, vocab, floor, peak, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that tokens from it on weigh at least `target`: two bits of it per pass over the row."""
    found = floor * 0
    quarter = found + 0x40000000
    for _ in range(16):
        first = found + quarter
        second = first + quarter
        third = second + quarter
        one, two, three = weight_sums(row, vocab, floor, peak, first, second, third, BY_MASS, BLOCK)
        step = (one >= target).to(tl.uint32) + (two >= target).to(tl.uint32) + (three >= target).to(tl.uint32)
        found += step * quarter
        quarter = quarter >> 2
    return tl.maximum(found, floor)


@triton.jit(do_not_specialize=["vocab"])
def filter_threshold_kernel(
    logits,
    top_k,
    top_p,
    min_p,
    out,
    vocab,
    logits_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    peak = tl.max(best)
    share = tl.load(min_p + index * min_p_stride)
    lowest = tl.where(share > 0, peak + tl.log(tl.maximum(share, 1e-30)), float("-inf"))
    lowest = lowest.to(tl.float32)
    k = tl.load(top_k + index * top_k_stride)
    p = tl.load(top_p + index * top_p_stride)
    if (k > 0) | (p < 1.0):
        floor = key_of(lowest)
        if k > 0:
            wanted = tl.minimum(k, vocab).to(tl.float32)
            floor = tl.maximum(floor, largest_key(row, vocab, floor * 0, peak, wanted, False, BLOCK))
        if p < 1.0:
            mass, _, _ = weight_sums(row, vocab, floor, peak, floor, floor, floor, True, BLOCK)
            floor = largest_key(row, vocab, floor, peak, p * mass, True, BLOCK)
        smallest = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            score = tl.load(row + at, mask=at < vocab, other=float("inf"))
            smallest = tl.minimum(smallest, tl.where(key_of(score) >= floor, score, float("inf")))
        lowest = tl.min(smallest)
    tl.store(out + index, lowest)


def filter_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_candidates: int) -> Tensor:
    """See `kernels.sampling.filter_threshold`. `num_candidates` is not needed: each row does its own filters only."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    strides = logits.stride(0), top_k.stride(0), top_p.stride(0), min_p.stride(0)
    filter_threshold_kernel[(num_rows,)](logits, top_k, top_p, min_p, out, vocab, *strides, BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit(do_not_specialize=["vocab"])
def draw_kernel(
    logits,
    thresholds,
    uniform,
    out,
    vocab,
    logits_stride,
    threshold_stride,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    threshold = tl.load(thresholds + index * threshold_stride) if HAS_THRESHOLD else float("-inf")
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    peak = tl.max(best)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        total += tl.sum(tl.where(score >= threshold, tl.exp(score - peak), 0.0)).to(tl.float64)
    target = tl.load(uniform + index) * total
    before = tl.zeros((), tl.float64)
    drawn = tl.full((), 0x7FFFFFFF, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        weight = tl.where(score >= threshold, tl.exp(score - peak), 0.0)
        reached = (before + tl.cumsum(weight, axis=0).to(tl.float64) > target) & (weight > 0)
        drawn = tl.minimum(drawn, tl.min(tl.where(reached, at, 0x7FFFFFFF)))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0)))
        before += tl.sum(weight).to(tl.float64)
    # Rounding may leave the sum of the parts a hair below the total.
    tl.store(out + index, tl.minimum(drawn, last).to(tl.int64))


def draw(logits: Tensor, thresholds: Tensor | None, uniform: Tensor) -> Tensor:
    """See `kernels.sampling.draw`."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    draw_kernel[(num_rows,)](
        logits,
        logits if thresholds is None else thresholds,
        uniform,
        out,
        vocab,
        logits.stride(0),
        0 if thresholds is None else thresholds.stride(0),
        HAS_THRESHOLD=thresholds is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
