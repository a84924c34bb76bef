# SPDX-License-Identifier: Apache-2.0
"""Triton: argmax in two launches, a row cut into parts so that a few rows fill the device too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Logits a program looks at."""


@triton.jit(do_not_specialize=["vocab", "num_parts"])
def argmax_part_kernel(logits, part_value, part_index, vocab, num_parts, logits_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * logits_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    # NaN compares false with everything: as infinity it makes its row fail.
    value = tl.where(value == value, value, float("inf"))
    best = tl.max(value, axis=0)
    index = tl.min(tl.where((value == best) & (at < vocab), at, 0x7FFFFFFF), axis=0)
    tl.store(part_value + row * num_parts + part, best)
    tl.store(part_index + row * num_parts + part, index)


@triton.jit(do_not_specialize=["num_parts"])
def argmax_kernel(part_value, part_index, out, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    value = tl.load(part_value + row * num_parts + part, mask=inside, other=float("-inf"))
    index = tl.load(part_index + row * num_parts + part, mask=inside, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, index, 0x7FFFFFFF), axis=0)
    is_finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(out + row, tl.where(is_finite, token, -1).to(tl.int64))


def finite_argmax(logits: Tensor, out: Tensor) -> Tensor:
    """See `kernels.greedy.finite_argmax`."""
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    if num_rows:
        argmax_part_kernel[(num_parts, num_rows)](
            logits, values, indices, vocab, num_parts, logits.stride(0), BLOCK=PART, num_warps=8
        )
        argmax_kernel[(num_rows,)](
            values, indices, out, num_parts, BLOCK=max(triton.next_power_of_2(num_parts), 64), num_warps=4
        )
    return out
