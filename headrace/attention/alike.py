# SPDX-License-Identifier: Apache-2.0
"""VANILLA on a CPU for `deterministic`: a token attends alike alone, in a batch, and in any chunk.

Queries of a KV head, those of all its heads and of some tokens, are the rows of calls of proven sizes
(`kernels/row_pieces.py`). Torch's kernel takes the keys of a call in units of 512, each by itself, so it is given whole
units: in each a query is computed alike, and one that it sees nothing of leaves it as it was. All is in fp32.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headrace.attention.base import AttentionMetadata, AttentionNeed
from headrace.attention.reference import Planner, VanillaAttention
from headrace.kernels.row_pieces import SIZES, agreeing_sizes, cut
from headrace.utils.math import cdiv

UNIT = 512
"""Keys that torch's kernel takes at a time."""

MAX_GROUP_BYTES = 4 << 20
"""Of K and V, for decode rows that share a call."""

MAX_KEPT_MASKS = 8 << 20
"""Numbers of a step's masks that the layers share; beyond, each makes its own."""


@dataclass(slots=True)
class Piece:
    """Some packed queries and the keys they are given, as ranges of their call's."""

    start: int
    count: int
    size: int
    """The count it is padded to."""
    first_key: int
    end_key: int
    mask: Tensor | None = None
    """Added to the scores: fp32 [num_rows, 1, size, keys]."""


@dataclass(slots=True)
class Call:
    """Rows that attend together: several of one new token each, or one prefill chunk."""

    tokens: Tensor
    """int64 [num_rows * new tokens]: theirs, of the step's."""
    num_rows: int
    index: Tensor
    """int64: which tiles of the cache to copy; K before V, then row, head, block."""
    first_positions: Tensor
    """int64 [num_rows]: of each row's first new token."""
    first_keys: Tensor
    """int64 [num_rows]: the position of the first copied key."""
    pieces: list[Piece]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's CPU kernel. q: fp32 [rows, heads, queries, head_dim]; k, v likewise over keys."""
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )[0]
    return found


@cache
def proven_sizes(num_heads: int, head_dim: int, num_threads: int) -> tuple[int, ...]:
    """The numbers of packed queries with which each is attended alike, on so many threads."""
    generator = torch.Generator().manual_seed(head_dim)
    queries, keys, values = (
        torch.randn(1, num_heads, n, head_dim, generator=generator) for n in (SIZES[-1], 2 * UNIT, 2 * UNIT)
    )
    scale = head_dim**-0.5

    def product(rows: Tensor) -> Tensor:
        q = rows.view(-1, num_heads, head_dim).transpose(0, 1).unsqueeze(0).contiguous()
        return attend(q, keys, values, None, scale)[0].transpose(0, 1).flatten(1)

    return agreeing_sizes(product, queries[0].transpose(0, 1).flatten(1))


class AlikeVanillaAttention(VanillaAttention):
    """One layer's attention, on a CPU."""

    def __init__(self, need: AttentionNeed) -> None:
        super().__init__(need)
        self.sizes = proven_sizes(need.num_kv_heads, need.head_dim, torch.get_num_threads())

    def forward(
        self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, group: int, kv_scale: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if self.tiles_of is not kv_cache:
            self.bind(kv_cache, group)
        plan: list[Call] | None = metadata.plans.get(self.plan_key)
        if plan is None:
            plan = metadata.plans[self.plan_key] = self.plan(Planner(self, kv_cache, metadata, group))
        heads, width, dim = self.need.num_kv_heads, self.group_size, self.need.head_dim
        out = torch.empty(q.shape[0], heads * width * dim, dtype=self.dtype, device=q.device)
        for call in plan:
            tiles = self.tiles.index_select(0, call.index)
            kv = self.numbers(tiles, call.num_rows, kv_scale, torch.float32)
            new = q.index_select(0, call.tokens).float().view(call.num_rows, -1, heads, width, dim)
            queries = new.transpose(1, 2).reshape(call.num_rows, heads, -1, dim)
            attended = torch.cat([self.attend_piece(call, piece, queries, kv) for piece in call.pieces], 2)
            by_token = attended.view(call.num_rows, heads, -1, width, dim).transpose(1, 2)
            out.index_copy_(0, call.tokens, by_token.reshape(call.tokens.shape[0], -1).to(self.dtype))
        return out

    def attend_piece(self, call: Call, piece: Piece, queries: Tensor, kv: Tensor) -> Tensor:
        """queries: [num_rows, heads, packed, head_dim]; kv: [2, num_rows, heads, keys, head_dim]."""
        q = queries.new_zeros(*queries.shape[:2], piece.size, queries.shape[3])
        q[:, :, : piece.count] = queries[:, :, piece.start : piece.start + piece.count]
        k, v = kv[:, :, :, piece.first_key : piece.end_key]
        mask = self.mask(call, piece) if piece.mask is None else piece.mask
        return attend(q, k, v, mask, self.need.scale)[:, :, : piece.count]

    def mask(self, call: Call, piece: Piece) -> Tensor:
        """What a piece's queries do not see; see `Piece.mask`."""
        last = call.tokens.shape[0] // call.num_rows - 1
        place = torch.arange(piece.start, piece.start + piece.size) // self.group_size
        position = (call.first_positions.unsqueeze(1) + place.clamp_(max=last)).unsqueeze(2)
        key = (call.first_keys.unsqueeze(1) + torch.arange(piece.first_key, piece.end_key)).unsqueeze(1)
        hidden = key > position
        if self.need.window is not None:
            hidden |= key <= position - self.need.window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)

    def plan(self, planner: Planner) -> list[Call]:
        """The step's calls: decode rows with as many units together, chunks one by one."""
        starts, lens = planner.starts, planner.lens
        unit = max(UNIT, planner.tokens_per_block)
        most_rows = MAX_GROUP_BYTES // (unit * 2 * self.need.num_kv_heads * self.need.head_dim * 4)
        groups: dict[tuple[int, int], list[int]] = {}
        for row, length in enumerate(lens):
            count = starts[row + 1] - starts[row]
            if count and length:
                units = cdiv(length, unit) - self.first_key(length - count) // unit
                groups.setdefault((units, -1 if count == 1 else row), []).append(row)
        calls = []
        for (units, _), rows in groups.items():
            step = max(1, most_rows // units)
            calls += [self.call(planner, rows[at : at + step], units, unit) for at in range(0, len(rows), step)]
        pieces = [(call, piece) for call in calls for piece in call.pieces]
        sizes = (call.num_rows * piece.size * (piece.end_key - piece.first_key) for call, piece in pieces)
        if sum(sizes) <= MAX_KEPT_MASKS:
            for call, piece in pieces:
                piece.mask = self.mask(call, piece)
        return calls

    def first_key(self, position: int) -> int:
        """The first position that a query sees."""
        return 0 if self.need.window is None else max(0, position + 1 - self.need.window)

    def call(self, planner: Planner, rows: list[int], units: int, unit: int) -> Call:
        """Rows with equally many new tokens and units of keys; of more than one token, a single row."""
        starts, size = planner.starts, planner.tokens_per_block
        tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
        count = len(tokens) // len(rows)
        positions = [planner.lens[row] - count for row in rows]
        firsts = [self.first_key(position) // unit * unit for position in positions]
        last = torch.tensor([(planner.lens[row] - 1) // size for row in rows]).unsqueeze(1)
        column = torch.tensor(firsts).unsqueeze(1) // size + torch.arange(units * unit // size)
        # Past a row's end its last block is repeated: the mask hides it.
        blocks = planner.block_table[rows].long().gather(1, column.minimum(last))
        pieces = []
        for start, taken, padded in cut(count * self.group_size, self.sizes):
            # Of a single token, all pieces see the same units.
            first = self.first_key(positions[0] + start // self.group_size) // unit
            end = cdiv(positions[0] + (start + taken - 1) // self.group_size + 1, unit)
            before = firsts[0] // unit
            pieces.append(Piece(start, taken, padded, (first - before) * unit, (end - before) * unit))
        return Call(
            tokens=torch.tensor(tokens),
            num_rows=len(rows),
            index=planner.index(blocks),
            first_positions=torch.tensor(positions),
            first_keys=torch.tensor(firsts),
            pieces=pieces,
        )
