# SPDX-License-Identifier: Apache-2.0
"""Triton: the loop over keys that prefill and decode share, and the table of tile sizes."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.kv_quant_triton import from_fp8, load_scale

LOG2E = 1.4426950408889634

SMALL_SHARED_MEMORY = 101376
"""Bytes of shared memory one program may take on sm_86, 89, 120 and 121; the other targets give 166,912 or more."""

# Bytes of shared memory a program may take.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut. block_m: packed query rows; block_n: keys a turn."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shared_memory(device: torch.device) -> int:
    """What one program may take on a device; on the CPU (the interpreter) the least of all GPUs."""
    if device.type != "cuda":
        return SMALL_SHARED_MEMORY
    major, minor = torch.cuda.get_device_capability(device)
    return SHARED_MEMORY.get(10 * major + minor, SMALL_SHARED_MEMORY)


def multiplied_size(kv_dtype: torch.dtype, q_dtype: torch.dtype) -> int:
    """Bytes of a key's number as it is multiplied: what tiles are cut by. Codes of 8 bits become the query's kind."""
    return q_dtype.itemsize if kv_dtype.itemsize == 1 else kv_dtype.itemsize


def prefill_tile(head_dim: int, element_size: int, shared: int) -> Tile:
    """The prefill kernel's tile, by head width, `multiplied_size`, and shared memory."""
    if element_size == 4:
        return Tile(32, 32, 4, 1 if head_dim > 128 else 2)
    if head_dim <= 64:
        return Tile(128, 64, 4, 3)
    # On an H200, 32/8 heads of 128: 129 TFLOP/s over 512 tokens, 254 over 1k, 326 over 2k, 407 over 8k; 128 x 128 takes
    # 8 warps to 114, 232, 312 and 428. Longer chunks are cuDNN's there.
    if head_dim <= 128:
        return Tile(64, 64, 4, 3 if shared > 163840 else 2)
    return Tile(128, 64, 8, 2) if shared > 200000 else Tile(64, 32, 4, 2)


def decode_tile(head_dim: int, element_size: int, group_size: int, shared: int) -> Tile:
    """The decode kernel's tile; its queries are the heads of one KV head, at least the 16 that a product takes."""
    block_m = max(16, triton.next_power_of_2(group_size))
    if element_size == 4:
        return Tile(block_m, 32, 4, 1 if head_dim > 128 else 2)
    # On an H200, 32/8 heads of 128, four such programs a multiprocessor: 64 rows of 1,100 tokens take 72 us, 91 % of
    # the read bandwidth, 256 rows 272, one of 400 5. One warp and three stages are as fast alone, but more of them fit
    # than are meant to run, and then they pile up on some multiprocessors.
    if head_dim <= 128:
        return Tile(block_m, 32, 2 if block_m == 16 else 4, 4 if shared > 163840 else 3)
    return Tile(block_m, 32, 4, 3 if shared > 163840 else 2)


def programs_per_multiprocessor(tile: Tile, head_dim: int, element_size: int, shared: int) -> int:
    """Decode programs that fit beside each other: K and V in all stages but one, and some 6 KiB for the rest."""
    stage = 2 * tile.block_n * block_dim(head_dim) * element_size
    return min(max(shared // (max(tile.num_stages - 1, 1) * stage + 6144), 1), 8)


def block_dim(head_dim: int) -> int:
    """head_dim as a tile holds it: a power of two, at least the 16 that a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def cache_strides(kv_cache: Tensor) -> tuple[int, int, int, int]:
    """Strides of block, K or V, head and token of a layer's view; its last must be 1."""
    block, kv, head, token, element = kv_cache.stride()
    if element != 1:
        raise ValueError(f"the KV cache's last stride is {element}, not 1")
    return block, kv, head, token


@triton.jit
def prepare_query(query, scale_log2, kv_scale, kv_head, num_kv_heads, cache_type: tl.constexpr, KV: tl.constexpr):
    """The query as products take it, what the scores of its rows are multiplied by [M], and what the result is.

    Over a plain cache the rows' factors are not used: `attend_range` applies `scale_log2` where it costs nothing. Over
    e4m3, which a GPU converts to fp16, rows of 16-bit numbers are divided by their largest, so that fp16 holds them.
    """
    factor = tl.zeros([query.shape[0]], dtype=tl.float32) + scale_log2
    value_scale = 1.0
    if KV == "plain":
        query = query.to(cache_type)
    elif KV != "int8":
        factor *= tl.load(kv_scale + kv_head)
        value_scale = tl.load(kv_scale + num_kv_heads + kv_head)
        if query.dtype != tl.float32:
            wide = query.to(tl.float32)
            largest = tl.max(tl.abs(wide), axis=1)
            largest = tl.where(largest == 0.0, 1.0, largest)
            factor *= largest
            query = (wide / largest[:, None]).to(tl.float16)
    return query, factor, value_scale


@triton.jit
def read_keys(k, q_type: tl.constexpr, KV: tl.constexpr):
    """Keys as they are multiplied with a query of `q_type`."""
    if KV == "int8":
        k = k.to(q_type)
    elif KV != "plain":
        k = from_fp8(k, KV).to(q_type)
    return k


@triton.jit
def scale_scores(score, factors, scales, there, KV: tl.constexpr):
    """What scores over a cache of 8 bits stand for, before a softcap. scales: where int8 keys' are."""
    if KV != "plain":
        score = score * factors[:, None]
    if KV == "int8":
        score = score * load_scale(scales, there)[None, :]
    return score


@triton.jit
def read_values(v, p, scales, there, q_type: tl.constexpr, KV: tl.constexpr):
    """Values, and their weights p, as they are multiplied. Weights take int8's scales on, which can be too small for
    fp16."""
    if KV == "int8":
        p = p * load_scale(scales, there)[None, :]
        v = v.to(tl.float32 if q_type == tl.float32 else tl.bfloat16)
    elif KV != "plain":
        v = from_fp8(v, KV).to(q_type)
    return v, p.to(v.dtype)


@triton.jit
def attend_range(
    acc,
    total,
    most,
    q,
    factors,
    keys,
    values,
    table,
    block_stride,
    begin,
    end,
    position,
    scale_log2,
    softcap,
    HEAD_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend q [M, BLOCK_DIM] to the keys begin to end; acc, total and most are the running softmax.

    q, factors: from `prepare_query`. keys, values: the layer's cache at this head. table: the row's block ids.
    position: [M], the queries' own. When not MASKED, every query sees every key of the range, and the range is whole
    tiles. scale_log2: the scale of scores times log2(e); with a softcap, the scale over the cap, and softcap is the cap
    times log2(e).
    """
    column = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, BLOCK_N)
    # Block ids are loaded a tile ahead of K and V: those can then be on their way for several tiles at a time.
    last_block = tl.maximum(end - 1, 0) // TOKENS_PER_BLOCK
    block = tl.load(table + tl.minimum((begin + lane) // TOKENS_PER_BLOCK, last_block))
    for start in tl.range(begin, end, BLOCK_N):
        key = start + lane
        offset = block.to(tl.int64) * block_stride + (key % TOKENS_PER_BLOCK) * TOKEN_STRIDE
        block = tl.load(table + tl.minimum((key + BLOCK_N) // TOKENS_PER_BLOCK, last_block))
        if HEAD_DIM == BLOCK_DIM:
            k = tl.load(keys + offset[None, :] + column[:, None])
        else:
            k = tl.load(keys + offset[None, :] + column[:, None], mask=column[:, None] < HEAD_DIM, other=0)
        score = tl.dot(q, read_keys(k, q.dtype, KV), input_precision="ieee")
        # A plain cache's scale of scores is applied once to their largest, and in the exponent.
        factor = scale_log2 if KV == "plain" else 1.0
        scales = offset + (TOKENS_PER_BLOCK * HEAD_DIM - (key % TOKENS_PER_BLOCK) * (TOKEN_STRIDE - 2))
        score = scale_scores(score, factors, keys + scales, key < end, KV)
        if HAS_SOFTCAP:
            # tanh by exp: right at both ends, where exp gives 0 or infinity.
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (factor * 2.885390081777927)) + 1.0))
            factor = 1.0
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & (key[None, :] < end)
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        now_most = tl.maximum(most, tl.max(score, axis=1) * factor)
        # A query whose window starts after this tile has seen no key yet.
        base = tl.where(now_most == float("-inf"), 0.0, now_most) if WINDOW > 0 else now_most
        p = tl.exp2(score * factor - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        # Slots past a row's last token may hold anything, NaN included; their weight of 0 would not hide that.
        if MASKED:
            inside = (key[:, None] < end) & (column[None, :] < HEAD_DIM)
            v = tl.load(values + offset[:, None] + column[None, :], mask=inside, other=0)
        elif HEAD_DIM == BLOCK_DIM:
            v = tl.load(values + offset[:, None] + column[None, :])
        else:
            v = tl.load(values + offset[:, None] + column[None, :], mask=column[None, :] < HEAD_DIM, other=0)
        v, p = read_values(v, p, values + scales, key < end, q.dtype, KV)
        acc = tl.dot(p, v, acc, input_precision="ieee")
        most = now_most
    return acc, total, most


def softmax_scale(scale: float, softcap: float | None) -> tuple[float, float]:
    """`attend_range`'s scale_log2 and softcap."""
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
