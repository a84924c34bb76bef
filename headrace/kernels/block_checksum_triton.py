# SPDX-License-Identifier: Apache-2.0
"""Triton: checksums of KV blocks, at the speed that memory is read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Words of a tile."""
TILES = 16
"""Tiles that one program sums up."""


@triton.jit
def block_checksums_kernel(words, ids, partial, num_words, block_stride, BLOCK: tl.constexpr, TILES: tl.constexpr):
    block = tl.load(ids + tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for tile in range(TILES):
        word = (part * TILES + tile) * BLOCK + place
        inside = word < num_words
        x = tl.load(words + block * block_stride + word, mask=inside, other=0).to(tl.uint64, bitcast=True)
        # The numbers of `kernels.block_checksum`.
        x += word.to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        total += tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.store(partial + tl.program_id(0) * tl.num_programs(1) + part, tl.sum(total))


def block_checksums(blocks: Tensor, ids: Tensor) -> Tensor:
    """See `kernels.block_checksum.block_checksums`."""
    num_words = blocks.shape[1]
    num_parts = triton.cdiv(num_words, BLOCK * TILES)
    partial = torch.empty(ids.shape[0], num_parts, dtype=torch.int64, device=blocks.device)
    if ids.shape[0]:
        grid = (ids.shape[0], num_parts)
        block_checksums_kernel[grid](
            blocks, ids, partial, num_words, blocks.stride(0), BLOCK=BLOCK, TILES=TILES, num_warps=4
        )
    return partial.sum(1)
