# SPDX-License-Identifier: Apache-2.0
"""Rows are cut into pieces of sizes that give each of them the same bits, and into no others."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.row_pieces import SIZES, agreeing_sizes, cut, in_pieces


@pytest.mark.parametrize("sizes", [SIZES, (4,), (1,), (16, 64)])
def test_pieces_cover_all_rows_once_in_order(sizes: tuple[int, ...]) -> None:
    for num_rows in range(700):
        pieces = cut(num_rows, sizes)
        ends = [start + rows for start, rows, _ in pieces]
        assert [start for start, _, _ in pieces] == [0, *ends[:-1]][: len(pieces)]
        assert (ends or [0])[-1] == num_rows
        assert all(size in sizes and 0 < rows <= size for _, rows, size in pieces)
        assert all(rows == size for _, rows, size in pieces[:-1])


def test_padding_reaches_no_result() -> None:
    seen = []

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return x.sum(1, keepdim=True) + (0 if bias is None else bias)

    for num_rows in (0, 1, 5, 300):
        x = torch.randn(num_rows, 3)[:, :2]
        assert torch.equal(in_pieces(product, SIZES, x, torch.ones(1)), x.sum(1, keepdim=True) + 1)
    assert set(seen) <= {0, *SIZES}


def test_sizes_that_differ_or_whose_places_differ_are_left_out() -> None:
    x = torch.randn(SIZES[-1], 8)

    def by_size(rows: Tensor) -> Tensor:
        return rows * 3 if len(rows) <= 16 or len(rows) == 128 else rows * 3.0001

    def by_place(rows: Tensor) -> Tensor:
        return rows * (1 + torch.arange(len(rows)).unsqueeze(1) * 1e-3)

    def below_16(rows: Tensor) -> Tensor:
        return rows * 3 if len(rows) >= 16 else by_place(rows)

    assert agreeing_sizes(lambda rows: rows * 3, x) == SIZES
    assert agreeing_sizes(by_size, x) == (4, 8, 16, 128)
    assert agreeing_sizes(by_place, x) == (1,)
    assert agreeing_sizes(below_16, x) == (16, 32, 64, 128, 256)
