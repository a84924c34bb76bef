# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's CPU libraries by which a row's result is the same whatever rows lie beside it.

The libraries choose how they sum by the shape of a call: with one row fp32 is summed in another order than with four,
and so is bf16 over 1,500 inputs and more. So rows are taken in pieces of a few sizes only, padded, and
`agreeing_sizes` finds out with which of them every row of a piece gets the same bits.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = (4, 8, 16, 32, 64, 128, 256)
CHEAP_ROWS = 32
"""Up to so many, rows are padded to one piece: a product takes about as long as the reading of its weight."""
ALIGNMENT = 64
"""Bytes: where torch puts new tensors. MKL's results may depend on it."""


@cache
def cut(num_rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Pieces (first row, rows, size it is padded to), of ascending sizes, for so many rows."""
    pieces, start = [], 0
    while start < num_rows:
        left = num_rows - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        smaller = [smaller for smaller in sizes if smaller <= left]
        # Half a piece of padding costs more than a further call.
        if size > CHEAP_ROWS and 4 * left < 3 * size and smaller:
            size = smaller[-1]
        taken = min(size, left)
        pieces.append((start, taken, size))
        start += taken
    return tuple(pieces)


def in_pieces(
    product: Callable[[Tensor, Tensor | None], Tensor], sizes: tuple[int, ...], x: Tensor, bias: Tensor | None
) -> Tensor:
    """The product of x [num_rows, in_features], piece by piece."""
    pieces = cut(x.shape[0], sizes)
    if len(pieces) == 1:
        return product(padded(x, pieces[0][2]), bias)[: x.shape[0]]
    found = [product(padded(x[start : start + rows], size), bias)[:rows] for start, rows, size in pieces]
    return torch.cat(found) if found else product(x, bias)


def padded(piece: Tensor, size: int) -> Tensor:
    """The piece with rows of zeros behind it, contiguous and aligned. piece: [rows, width]."""
    rows = piece.shape[0]
    if rows < size:
        return F.pad(piece, (0, 0, 0, size - rows))
    return piece.contiguous() if piece.data_ptr() % ALIGNMENT == 0 else piece.clone()


def agreeing_sizes(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, ...]:
    """Of `SIZES`, the smallest with which a row's result does not depend on its place, and all that agree with it.

    x: as many rows as the largest. Where there is none: 1, each row by itself.
    """

    def with_size(size: int, rows: Tensor) -> Tensor:
        return torch.cat([product(piece) for piece in rows.split(size)])

    for place, smallest in enumerate(SIZES):
        few = x[:smallest]
        wanted = product(few)
        if all(torch.equal(product(few.roll(by, 0)), wanted.roll(by, 0)) for by in range(1, smallest)):
            wanted = with_size(smallest, x)
            larger = [size for size in SIZES[place + 1 :] if torch.equal(with_size(size, x), wanted)]
            return (smallest, *larger)
    return (1,)
