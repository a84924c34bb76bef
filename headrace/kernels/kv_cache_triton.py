# SPDX-License-Identifier: Apache-2.0
"""Triton: copying KV blocks."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def copy_blocks_kernel(arena, pairs, block_size, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0) * 2
    source = tl.load(pair).to(tl.int64)
    target = tl.load(pair + 1).to(tl.int64)
    if source >= 0:
        element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = element < block_size
        value = tl.load(arena + source * block_size + element, mask=inside)
        tl.store(arena + target * block_size + element, value, mask=inside)


def copy_blocks(arena: Tensor, pairs: Tensor) -> Tensor:
    """See `kernels.kv_cache.copy_blocks`."""
    block_size = arena.stride(0)
    if pairs.shape[0]:
        grid = (pairs.shape[0], triton.cdiv(block_size, BLOCK))
        copy_blocks_kernel[grid](arena, pairs, block_size, BLOCK=BLOCK, num_warps=8)
    return arena
