# SPDX-License-Identifier: Apache-2.0
"""The token embedding, which is also the output head where a model ties them."""

import torch
from torch import Tensor

from headrace.layers.build import BuildContext
from headrace.layers.linear import ColumnLinear


class Embedding(ColumnLinear):
    """ids [num_tokens] -> [num_tokens, hidden_size]; `project` multiplies by the same matrix, as a tied head does."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, multiplier: float | None = None) -> None:
        super().__init__(ctx, hidden_size, [vocab_size])
        self._rows = self.method.embed
        # Gemma rounds the multiplier to the weights' dtype before using it.
        self._multiplier = None if multiplier is None else float(torch.tensor(multiplier, dtype=ctx.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self._rows(self, ids)
        return rows if self._multiplier is None else rows * self._multiplier

    def project(self, x: Tensor) -> Tensor:
        """x: [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        return self._multiply(self, x, None)
