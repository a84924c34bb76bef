# SPDX-License-Identifier: Apache-2.0
"""What `deterministic` chooses on a CPU gives a row the same bits alone and among others, on any number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul, softcap
from headrace.kernels.logprobs import gather_logprobs
from headrace.kernels.norm import fused_add_rms_norm, rms_norm
from headrace.kernels.op import Op
from headrace.kernels.rope import qk_norm_rope_cache_write
from headrace.kernels.sampling import draw, filter_threshold


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows_of(count: int, width: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(count, width, generator=torch.Generator().manual_seed(width))).to(dtype)


def written(x: Tensor) -> Tensor:
    """q, and the keys and values that went into the cache, of 3 query heads and 1 KV head of 40."""
    cache = torch.zeros(len(x), 2, 1, 8, 40)
    table = torch.rand(64, 40, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(0.5, 2, 40)
    place, slots = torch.full((len(x),), 7), torch.arange(len(x)) * 8
    op = qk_norm_rope_cache_write.choose("cpu", True)
    q: Tensor = op(x, weight, weight, 1e-6, table, place, cache, slots, 3, 1, 40)
    return torch.cat((q.flatten(1), cache[:, :, :, 0].flatten(1)), 1)


def drawn(logits: Tensor) -> Tensor:
    count = len(logits)
    least = filter_threshold.choose("cpu", True)(
        logits, torch.zeros(count, dtype=torch.int32), torch.full((count,), 0.9), torch.full((count,), 0.01), 10**6
    )
    uniform = torch.full((count,), 0.7, dtype=torch.float64)
    pick = draw.choose("cpu", True)
    return torch.stack((least.double(), pick(logits, None, uniform), pick(logits, least, uniform)), 1)


def chosen(op: Op, *args: object) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        found = op.choose("cpu", True)(x.clone(), *args)
        return torch.cat(found, 1) if isinstance(found, tuple) else found

    return call


def scored(logits: Tensor) -> Tensor:
    return gather_logprobs.choose("cpu", True)(logits, torch.zeros(len(logits)), 3)[1]


def normed(x: Tensor, offset: float) -> Tensor:
    weight = torch.linspace(-1, 2, x.shape[1]).to(x.dtype)
    alone: Tensor = rms_norm.choose("cpu", True)(x, weight, 1e-5, offset)
    both = fused_add_rms_norm.choose("cpu", True)(x.clone(), x * 0.5, weight, 1e-5, offset)
    return torch.cat((alone, *both), 1)


# name -> (function of rows, their number and width)
CASES: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "norm": (lambda x: normed(x, 0.0), 300, 577),
    "norm-offset": (lambda x: normed(x, 1.0), 300, 577),
    "silu": (chosen(silu_and_mul), 500, 2 * 427),
    "gelu": (chosen(gelu_tanh_and_mul), 300, 2 * 427),
    "gelu-wide": (chosen(gelu_tanh_and_mul), 5, 2 * 40_001),
    "softcap": (chosen(softcap, 20.0), 30, 50_021),
    "rope": (written, 300, 5 * 40),
    "logprobs": (scored, 60, 50_021),
    "logprobs-small": (scored, 70, 333),
    "draw": (drawn, 7, 50_021),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone(name: str, dtype: torch.dtype) -> None:
    function, count, width = CASES[name]
    if name in ("logprobs", "logprobs-small", "draw") and dtype != torch.float32:
        pytest.skip("logits are fp32 by then")
    x = rows_of(count, width, dtype)
    whole = function(x)
    for size in (1, 2, 7, 40):
        assert torch.equal(torch.cat([function(rows) for rows in x.split(size)]), whole), size
