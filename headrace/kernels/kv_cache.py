# SPDX-License-Identifier: Apache-2.0
"""Moving KV: whole blocks inside an arena, one row's out of it."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.kv_quant import is_quantized, layer_view, read_tiles, tile_size, token_scales
from headrace.kernels.op import Case, on_cuda, op

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What an element is copied as, by its bytes: no unit that knows its dtype is needed."""


def copy_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Block sizes that are and are not multiples of a tile; a pair that does nothing."""
    for shape in ((8, 3, 2, 2, 16, 64), (8, 1, 2, 1, 8, 80)):
        arena = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(device, dtype)
        pairs = torch.tensor([[0, 5], [3, 2], [-1, 7]], device=device)
        yield Case(f"{shape[1]}x{shape[-1]}", (arena, pairs), 4 * arena[0].nbytes)
        yield Case(f"{shape[1]}x{shape[-1]} int32", (arena.clone(), pairs.int()), 4 * arena[0].nbytes)
        apart = torch.randn(8, 2, *shape[1:]).to(device, dtype)[:, 0]
        yield Case(f"{shape[1]}x{shape[-1]} blocks apart", (apart, pairs), 4 * arena[0].nbytes)
    whole = torch.arange(8 * 64, device=device).view(8, 1, 1, 1, 1, 64).to(torch.uint8).view(torch.float8_e4m3fn)
    yield Case("fp8", (whole, pairs), 4 * whole[0].nbytes)


@op(cases=copy_cases)
def copy_blocks(arena: Tensor, pairs: Tensor) -> Tensor:
    """Copy blocks, all layers of each, and return the arena.

    arena: [num_blocks, ...], each block contiguous. pairs: int32 or int64 [n, 2], (source, destination); a source of
    -1 does nothing. No destination is a source or a destination twice.
    """
    pairs = pairs[pairs[:, 0] >= 0]
    bits = arena.view(BITS[arena.dtype.itemsize])
    bits[pairs[:, 1]] = bits[pairs[:, 0]]
    return arena


def gather_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A row that ends in the middle of a block, cut short and padded; plain caches and those of 8 bits."""
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn(9, 3, 2, 2, 16, 64, generator=generator).to(device, dtype)
    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32, device=device)
    for length, size in ((50, 50), (50, 96), (64, 64), (33, 40)):
        yield Case(f"{length} of {size}", (arena[:, 1], table, length, size), 4 * length * 64 * dtype.itemsize)
    scale = torch.rand(2, 2, generator=generator).to(device)
    for kv_dtype, head_dim in itertools.product((torch.uint8, torch.int8), (64, 80)):
        codes = torch.randint(-126, 127, (9, 3, 2, 2, tile_size(16, head_dim, kv_dtype)), generator=generator)
        cache = layer_view(codes.to(torch.int8).view(kv_dtype).to(device), 1, 16, head_dim)
        if kv_dtype == torch.int8:
            token_scales(cache).copy_(torch.rand(9, 2, 2, 16, generator=generator))
        args = (cache, table, 50, 96, dtype, scale if kv_dtype == torch.uint8 else None)
        yield Case(f"{kv_dtype}, heads of {head_dim}", args, 4 * 50 * head_dim)


@op(cases=gather_cases)
def gather_row(
    kv_cache: Tensor,
    table: Tensor,
    length: int,
    size: int,
    dtype: torch.dtype | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """One row's K and V, contiguous: [2, num_kv_heads, size, head_dim], zeros from `length` on.

    kv_cache: a layer's view [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim]. table: int32 [max_blocks], the
    row's blocks. dtype, kv_scale: of the result, and fp32 [2, num_kv_heads], for a cache of 8 bits
    (`kernels/kv_quant.py`); a plain one gives its own dtype.
    """
    _, _, heads, per_block, head_dim = kv_cache.shape
    blocks = table[: -(-length // per_block)].long()
    if is_quantized(kv_cache):
        assert dtype is not None, "codes are read as numbers of some dtype"
        tile = tile_size(per_block, head_dim, kv_cache.dtype)
        whole = kv_cache.as_strided((*kv_cache.shape[:3], tile), (*kv_cache.stride()[:3], 1))
        held = read_tiles(whole[blocks].permute(1, 2, 0, 3)[:, None], per_block, head_dim, kv_scale, dtype)[:, 0]
    else:
        held = kv_cache[blocks].permute(1, 2, 0, 3, 4).reshape(2, heads, -1, head_dim)
    out = held.new_zeros(2, heads, size, head_dim)
    out[:, :, :length] = held[:, :, :length]
    return out


gather_row.impl("triton", on_cuda, "headrace.kernels.kv_cache_triton:gather_row")
copy_blocks.impl("triton", on_cuda, "headrace.kernels.kv_cache_triton:copy_blocks")
