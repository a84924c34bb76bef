# SPDX-License-Identifier: Apache-2.0
"""Moving whole KV blocks inside an arena."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op


def copy_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Block sizes that are and are not multiples of a tile; a pair that does nothing."""
    for shape in ((8, 3, 2, 2, 16, 64), (8, 1, 2, 1, 8, 80)):
        arena = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(device, dtype)
        pairs = torch.tensor([[0, 5], [3, 2], [-1, 7]], device=device)
        yield Case(f"{shape[1]}x{shape[-1]}", (arena, pairs), 4 * arena[0].nbytes)
        yield Case(f"{shape[1]}x{shape[-1]} int32", (arena.clone(), pairs.int()), 4 * arena[0].nbytes)


@op(cases=copy_cases)
def copy_blocks(arena: Tensor, pairs: Tensor) -> Tensor:
    """Copy blocks, all layers of each, and return the arena.

    arena: [num_blocks, ...], contiguous. pairs: int32 or int64 [n, 2], (source, destination); a source of -1 does
    nothing. No destination is a source or a destination twice.
    """
    pairs = pairs[pairs[:, 0] >= 0]
    arena[pairs[:, 1]] = arena[pairs[:, 0]]
    return arena


copy_blocks.impl("triton", on_cuda, "headrace.kernels.kv_cache_triton:copy_blocks")
