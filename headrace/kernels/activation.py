# SPDX-License-Identifier: Apache-2.0
"""Gated activations over a fused gate/up product, and the cap of a head's logits.

Torch's CPU loops take what does not fill a vector, at a row's end or where the threads' shares meet, by other code with
other last bits. So under `deterministic` they are given whole rows, too few numbers to be shared out.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.op import Case, on_cpu, on_cuda, op

UNSHARED = 16384
"""Numbers that torch does not share out over threads; it does so above 24,576 (GELU) or 32,767."""


def gated_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Widths that are and are not powers of two, and values on both tails."""
    for num_tokens, width in ((1, 1536), (7, 96), (33, 1000), (3, 12288)):
        generator = torch.Generator().manual_seed(width)
        x = (4 * torch.randn(num_tokens, 2 * width, generator=generator)).to(device, dtype)
        yield Case(f"{num_tokens}x{width}", (x,), x.nbytes * 3 // 2)


def cap_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A row, and several, with values on both tails."""
    for num_rows, vocab in ((1, 1000), (3, 33_001)):
        logits = 30 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
        yield Case(f"{num_rows}x{vocab}", (logits.to(device, dtype), 20.0))


@op(cases=gated_cases)
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. x: [num_tokens, 2 * width], gate first. Returns [num_tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@op(cases=gated_cases)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(gate, tanh approximation) * up. x: [num_tokens, 2 * width], gate first. Returns [num_tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@op(cases=cap_cases)
def softcap(logits: Tensor, cap: float) -> Tensor:
    """tanh(logits / cap) * cap. logits: [num_rows, vocab]. Returns the same shape and dtype."""
    return torch.tanh(logits / cap) * cap


@silu_and_mul.impl("cpu rows", on_cpu, use="deterministic")
def silu_and_mul_cpu_rows(x: Tensor) -> Tensor:
    """Few rows at a time."""
    return _by_rows(x, F.silu)


@gelu_tanh_and_mul.impl("cpu rows", on_cpu, use="deterministic")
def gelu_tanh_and_mul_cpu_rows(x: Tensor) -> Tensor:
    """Few rows at a time."""
    return _by_rows(x, partial(F.gelu, approximate="tanh"))


@softcap.impl("cpu rows", on_cpu, use="deterministic")
def softcap_cpu_rows(logits: Tensor, cap: float) -> Tensor:
    """Row by row."""
    capped = torch.empty_like(logits)
    for row, out in zip(logits, capped, strict=True):
        out.copy_(softcap.reference(row, cap))
    return capped


def _by_rows(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up, in pieces of whole rows; gate and up lie apart, so torch runs along each row by itself."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, width)
    step = max(1, UNSHARED // width)
    for start in range(0, num_tokens, step):
        piece = x[start : start + step]
        torch.mul(act(piece[:, :width]), piece[:, width:], out=out[start : start + step])
    return out


silu_and_mul.impl("triton", on_cuda, "headrace.kernels.activation_triton:silu_and_mul")
gelu_tanh_and_mul.impl("triton", on_cuda, "headrace.kernels.activation_triton:gelu_tanh_and_mul")
