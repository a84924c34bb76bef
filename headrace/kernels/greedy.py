# SPDX-License-Identifier: Apache-2.0
"""The most probable token of each row."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op

FAILED = -1
"""The token of a row that holds no finite maximum."""


def argmax_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A tie, NaN, an infinity of either sign, nothing but -infinity; one row and several, one part and many."""
    for num_rows, vocab in ((1, 100), (6, 100), (1, 5000), (6, 20000)):
        logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
        logits[0, vocab // 3] = logits[0, vocab // 2] = 9.0
        if num_rows > 1:
            logits[1, vocab - 1] = 9.5
            logits[2, 5] = math.nan
            logits[3, 7] = math.inf
            logits[4, 9] = -math.inf
            logits[5] = -math.inf
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
        yield Case(f"{num_rows}x{vocab}", (logits.to(device), out), logits.nbytes)


@op(cases=argmax_cases)
def finite_argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Each row's largest logit, the first of equals; FAILED where it is not finite (NaN counts as largest).

    logits: [n, vocab], any float dtype. out: int64 [n], written and returned.
    """
    best, tokens = logits.max(dim=1)
    # 0 for a finite number, NaN for all others.
    return out.copy_(torch.where(best - best == 0, tokens, FAILED))


finite_argmax.impl("triton", on_cuda, "headrace.kernels.greedy_triton:finite_argmax")
