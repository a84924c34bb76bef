# SPDX-License-Identifier: Apache-2.0
"""Triton: log-probabilities with a normaliser that a program sums by itself, in one order whatever the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.logprobs import gather_normalised

BLOCK = 4096


@triton.jit(do_not_specialize=["vocab"])
def normaliser_kernel(logits, out, vocab, logits_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    peak = tl.max(best)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(row + at, mask=at < vocab, other=float("-inf")) - peak)
    tl.store(out + index, peak + tl.log(tl.sum(total)))


def gather_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.logprobs.gather_logprobs`."""
    num_rows, vocab = logits.shape
    normaliser = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        normaliser_kernel[(num_rows,)](logits, normaliser, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=8)
    return gather_normalised(logits, chosen, num_top, normaliser)
