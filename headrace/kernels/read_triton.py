# SPDX-License-Identifier: Apache-2.0
"""Triton: sums of long pieces, one program a piece: as fast as memory can be read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.read import PIECE

BLOCK = 8192


@triton.jit
def read_sums_kernel(x, out, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    offsets = piece * PIECE + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, PIECE, BLOCK):
        total += tl.load(x + offsets + start).to(tl.float32)
    tl.store(out + piece, tl.sum(total, axis=0))


def read_sums(x: Tensor) -> Tensor:
    """Sums of pieces of a contiguous tensor of a multiple of PIECE numbers."""
    pieces = x.shape[0] // PIECE
    out = torch.empty(pieces, dtype=torch.float32, device=x.device)
    read_sums_kernel[(pieces,)](x, out, PIECE=PIECE, BLOCK=BLOCK, num_warps=8)
    return out
