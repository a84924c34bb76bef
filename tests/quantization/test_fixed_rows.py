# SPDX-License-Identifier: Apache-2.0
"""A row's product has the same bits in every batch, and what the sizes are found with shows how a product is summed."""

import pytest
import torch
from torch import nn

from headrace.layers.build import BuildContext
from headrace.layers.linear import ColumnLinear
from headrace.quantization.base import QuantMethod
from headrace.quantization.fixed_rows import FixedRows, orders_of_summing
from headrace.quantization.int4_cpu import CpuMethod
from headrace.quantization.none import PlainMethod


def uniform() -> QuantMethod:
    return CpuMethod(is_uniform=True)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (PlainMethod, torch.float32),
        (PlainMethod, torch.float16),
        (PlainMethod, torch.bfloat16),
        (uniform, torch.bfloat16),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch(make: type[QuantMethod], dtype: torch.dtype, has_bias: bool) -> None:
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    methods = iter([FixedRows(make(), make)])
    ctx = BuildContext(dtype, cpu, lambda _: next(methods), lambda _: None, dtype, 64)  # type: ignore
    linear = ColumnLinear(ctx, 1600, [72, 40], has_bias)
    for part, rows in enumerate((72, 40)):
        linear.load_part("weight", part, torch.randn(rows, 1600, generator=generator))
        if has_bias:
            linear.load_part("bias", part, torch.randn(rows, generator=generator))
    linear.finish_load()
    x = torch.randn(400, 1600, generator=generator).to(dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    torch.testing.assert_close(
        alone.double(),
        nn.functional.linear(x.double(), *(part.double() for part in weights(linear, generator, has_bias))),
        rtol=2e-2,
        atol=0.5,
    )
    for count in (2, 3, 5, 7, 31, 33, 100, 257, 400):
        assert torch.equal(torch.cat([linear(piece) for piece in x.split(count)]), alone), count


def weights(linear: ColumnLinear, generator: torch.Generator, has_bias: bool) -> list[torch.Tensor]:
    """What was loaded, made once more."""
    generator.manual_seed(0)
    parts, biases = [], []
    for rows in (72, 40):
        parts.append(torch.randn(rows, 1600, generator=generator))
        if has_bias:
            biases.append(torch.randn(rows, generator=generator))
    return [torch.cat(parts), *([torch.cat(biases)] if has_bias else [])]


def test_another_order_of_summing_shows_in_nearly_every_result() -> None:
    x, weight = orders_of_summing(768, 40)
    terms = x[:8, None, :].bfloat16().float() * weight
    whole, half, rest = torch.zeros(3, 8, 40)
    for k in range(768):
        whole += terms[..., k]
        (half if k < 384 else rest).add_(terms[..., k])
    differ = (whole.bfloat16() != (half + rest).bfloat16()).float().mean()
    assert differ > 0.9
