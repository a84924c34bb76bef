# SPDX-License-Identifier: Apache-2.0
"""Contiguous copies of long decode rows' K and V, grown by a token a step, so that the CPU need not gather them anew.

A copy lives from one step to the next and no longer: a row that decoded in the step before finds its copy by the block
that held its then last token, and every copy that no row claims is dropped. That block was being written by that row
alone, so another row can claim the copy only by a prefix hit on the very same tokens, for which it is as right.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

SLACK = 128
"""Tokens of room in a new copy; when they are used up the row is gathered again."""


@dataclass(slots=True)
class CopiedRow:
    """A decode row of this step that attends from its copy."""

    row: int
    token: int
    length: int
    """KV length, the new token included."""
    block: int
    """The block that holds the new token."""
    previous_block: int
    """The block that holds the token before it."""
    offset: int
    """The new token's place in its block."""


@dataclass(slots=True)
class RowCopy:
    """One row's K and V of one layer."""

    kv: Tensor
    """[2, num_kv_heads, room, head_dim]."""
    k: Tensor
    """[1, num_kv_heads, room, head_dim], a view of kv; v likewise."""
    v: Tensor
    length: int


class RowCopies:
    """One layer's copies."""

    def __init__(self) -> None:
        self.by_block: dict[int, RowCopy] = {}

    def claim(self, rows: list[CopiedRow], read_token: Callable[[int, int], Tensor]) -> list[RowCopy | None]:
        """This step's copies, each grown by its row's new token; None where a row has to be gathered (see `keep`).

        read_token: (block, offset) -> that token's K and V [2, num_kv_heads, head_dim].
        """
        before, self.by_block = self.by_block, {}
        found: list[RowCopy | None] = []
        for row in rows:
            copy = before.pop(row.previous_block, None)
            if copy is not None and copy.length == row.length - 1 and row.length <= copy.kv.shape[2]:
                copy.kv.select(2, row.length - 1).copy_(read_token(row.block, row.offset))
                copy.length = row.length
                self.by_block[row.block] = copy
            else:
                copy = None
            found.append(copy)
        return found

    def keep(self, row: CopiedRow, gathered: Tensor) -> RowCopy:
        """A new copy of a row: gathered [2, num_kv_heads, at least length, head_dim]."""
        _, heads, _, head_dim = gathered.shape
        kv = gathered.new_empty(2, heads, row.length + SLACK, head_dim)
        kv[:, :, : row.length] = gathered[:, :, : row.length]
        copy = self.by_block[row.block] = RowCopy(kv, kv[:1], kv[1:], row.length)
        return copy

    def clear(self) -> None:
        """Drop all copies."""
        self.by_block.clear()
