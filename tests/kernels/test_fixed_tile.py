# SPDX-License-Identifier: Apache-2.0
"""A row's product has the same bits alone and in any batch, whether its parts are summed by one program or several."""

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels import fixed_tile_triton
from headrace.kernels.fixed_tile_triton import fixed_tile_linear, num_parts


def test_a_row_has_the_same_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(130, 600, generator=generator), torch.randn(140, 600, generator=generator)
    assert num_parts(600, 140, fixed_tile_triton.BLOCK_K_FP32) > 1
    cut = fixed_tile_linear(x, weight, None)
    torch.testing.assert_close(cut, x @ weight.T, rtol=1e-4, atol=1e-4)
    for rows in ((0, 1), (5, 8), (60, 130)):
        assert torch.equal(fixed_tile_linear(x[slice(*rows)], weight, None), cut[slice(*rows)])
    # With no room for counters, a program takes all parts.
    monkeypatch.setattr(fixed_tile_triton, "MAX_TILES", 0)
    assert torch.equal(fixed_tile_linear(x, weight, None), cut)
