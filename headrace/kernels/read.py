# SPDX-License-Identifier: Apache-2.0
"""Reading a tensor and doing next to nothing with it: what a device's read bandwidth is measured with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op

PIECE = 65_536
"""Numbers that are added up into one."""


def read_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """One piece and several."""
    for pieces in (1, 3):
        generator = torch.Generator().manual_seed(pieces)
        x = torch.rand(pieces * PIECE, generator=generator).to(device, dtype)
        yield Case(f"{pieces} pieces", (x,), x.nbytes)


@op(cases=read_cases, rtol=1e-3)
def read_sums(x: Tensor) -> Tensor:
    """Sums of pieces. x: [a multiple of PIECE]. Returns [num_pieces], fp32."""
    return x.view(-1, PIECE).sum(dim=1, dtype=torch.float32)


read_sums.impl("triton", on_cuda, "headrace.kernels.read_triton:read_sums")
