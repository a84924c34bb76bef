# SPDX-License-Identifier: Apache-2.0
"""VANILLA: attention in plain torch. The CPU's product path, and a way to debug on a GPU.

Decode rows attend with the query heads of a KV head packed as rows of one query. Short rows copy their blocks, head by
head, into one buffer and share a call, padded; long ones keep a contiguous copy from step to step (`row_copies.py`).
A cache of 8 bits becomes numbers as it is copied: fp32, or bf16 where a chunk attends in bf16.
Prefill chunks attend one by one. All that depends on the step alone is worked out once, in a `Plan`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.base import CAPABILITIES, DTYPES, AttentionMetadata, AttentionNeed
from headrace.attention.row_copies import SLACK, CopiedRow, RowCopies
from headrace.kernels.kv_quant import read_tiles, read_token, tile_size
from headrace.utils.machine import cpu_has_bf16
from headrace.utils.math import cdiv

# Bytes of gathered K and V that decode rows may share, padding included. Measured on a Zen 4 core with 1 MiB of L2,
# 9/3 heads of 64: 8 rows of 150 tokens take 340 us together and 390-480 one by one; 8 rows of 500 the same either way.
GROUP_BYTES = 1 << 20

# A row of so many bytes of K and V keeps a copy. Measured there, 9/3 heads of 64: a row of 500 tokens takes 75 us from
# its copy and 112 gathered, 8 rows of 150 the same either way.
MIN_COPY_BYTES = 512 << 10

# At most so many bytes of copies a layer, over all its rows; where they would be more, rows are gathered each step.
MAX_COPY_BYTES = 16 << 20

# From so many new tokens on, a bf16 model's prefill attends in bf16: on cores with bf16 dot products 2.3 ms instead of
# 5.3 for 512 tokens of 9/3 heads of 64. Below, and in decode, fp32 is as fast or faster.
MIN_BF16_TOKENS = 64


@dataclass(slots=True)
class Call:
    """Rows that attend together: several of one new token each, or one prefill chunk."""

    first_token: int
    end_token: int
    num_rows: int
    index: Tensor
    """int64 [2 * num_rows * num_kv_heads * num_blocks]: the [tokens_per_block, head_dim] tiles to copy, counted from
    the layer view's first element; K before V, then row, head, block."""
    begin: int
    end: int
    """The keys attended to, as a range of the copied ones."""
    mask: Tensor | None
    """Added to the scores, in the compute dtype: [num_rows, num_kv_heads, group_size, keys] for decode rows,
    [num_tokens, keys] for a chunk. None: a decode row sees all keys, a chunk is plainly causal."""
    dtype: torch.dtype
    """Compute dtype."""


@dataclass(slots=True)
class Plan:
    """A step, for all layers of one cache layout, head count and window."""

    copied: list[CopiedRow]
    decode: list[Call]
    prefill: list[Call]
    buffer: Tensor
    """[most tiles of a call, `tile_size`]: where tiles are copied to."""
    planner: "Planner"
    """For what only some layers need."""


class VanillaAttention:
    """One layer's attention in torch ops."""

    name = "VANILLA"
    capability = CAPABILITIES["VANILLA"]

    def __init__(self, need: AttentionNeed) -> None:
        self.need = need
        self.dtype = DTYPES[need.dtype]
        self.is_quantized = need.kv_dtype in ("fp8", "int8")
        self.compute_dtype = torch.float32 if self.is_quantized else DTYPES[need.kv_dtype]
        self.group_size = need.num_q_heads // need.num_kv_heads
        self.long_prefill_dtype = torch.bfloat16 if need.dtype == "bfloat16" and cpu_has_bf16() else None
        self.copies = RowCopies()
        self.tiles = torch.empty(0)
        self.tiles_of: Tensor | None = None
        self.plan_key: tuple[object, ...] = ()

    def forward(
        self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, group: int, kv_scale: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.forward`. Lengths are read on the host, so on a GPU this waits for it."""
        need = self.need
        if self.tiles_of is not kv_cache:
            self.bind(kv_cache, group)
        plan = metadata.plans.get(self.plan_key)
        if plan is None:
            plan = metadata.plans[self.plan_key] = Planner(self, kv_cache, metadata, group).plan()
        out = torch.empty(q.shape[0], need.num_q_heads * need.head_dim, dtype=self.dtype, device=q.device)
        if plan.copied:
            self.decode_copied(plan, kv_cache, kv_scale, q, out)
        else:
            self.copies.clear()
        for call in plan.decode:
            self.decode(call, plan.buffer, kv_scale, q, out)
        for call in plan.prefill:
            self.prefill(call, plan.buffer, kv_scale, q, out)
        return out

    def bind(self, kv_cache: Tensor, group: int) -> None:
        """Take a layer's view of the cache: once, as it is the same tensor at every step."""
        need = self.need
        self.copies.clear()
        self.tiles, self.tiles_of = tile_view(kv_cache), kv_cache
        self.plan_key = ("VANILLA", group, need, kv_cache.shape, kv_cache.stride())

    def decode_copied(self, plan: Plan, kv_cache: Tensor, kv_scale: Tensor | None, q: Tensor, out: Tensor) -> None:
        """Rows of one new token each that attend from their own copies."""
        need = self.need

        def token(block: int, offset: int) -> Tensor:
            if self.is_quantized:
                return read_token(kv_cache, block, offset, kv_scale)
            return kv_cache.select(0, block).select(2, offset)

        shape = (1, need.num_kv_heads, self.group_size, need.head_dim)
        for row, found in zip(plan.copied, self.copies.claim(plan.copied, token), strict=True):
            copy = found
            if copy is None:
                gathered = self.tiles.index_select(0, plan.planner.row_index(row.row))
                copy = self.copies.keep(row, self.numbers(gathered, 1, kv_scale, self.compute_dtype)[:, 0])
            k, v = copy.k.narrow(2, 0, row.length), copy.v.narrow(2, 0, row.length)
            query = q.narrow(0, row.token, 1).to(k.dtype).view(shape)
            out.narrow(0, row.token, 1).view(shape).copy_(self.attend(query, k, v, None))

    def numbers(self, tiles: Tensor, num_rows: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Copied tiles as K and V: [2, num_rows, num_kv_heads, keys, head_dim]."""
        need = self.need
        if self.is_quantized:
            shaped = tiles.view(2, num_rows, need.num_kv_heads, -1, tiles.shape[-1])
            return read_tiles(shaped, need.tokens_per_block, need.head_dim, kv_scale, dtype)
        return tiles.view(2, num_rows, need.num_kv_heads, -1, need.head_dim).to(dtype)

    def gather(self, call: Call, buffer: Tensor, kv_scale: Tensor | None) -> Tensor:
        """The call's K and V: [2, num_rows, num_kv_heads, keys, head_dim]."""
        tiles = torch.index_select(self.tiles, 0, call.index, out=buffer[: call.index.shape[0]])
        return self.numbers(tiles, call.num_rows, kv_scale, call.dtype)[:, :, :, call.begin : call.end]

    def decode(self, call: Call, buffer: Tensor, kv_scale: Tensor | None, q: Tensor, out: Tensor) -> None:
        """One new token a row."""
        kv = self.gather(call, buffer, kv_scale)
        shape = (call.num_rows, self.need.num_kv_heads, self.group_size, self.need.head_dim)
        packed = q[call.first_token : call.end_token].to(call.dtype).view(shape)
        attended = self.attend(packed, kv[0], kv[1], call.mask)
        out[call.first_token : call.end_token].view(shape).copy_(attended)

    def prefill(self, call: Call, buffer: Tensor, kv_scale: Tensor | None, q: Tensor, out: Tensor) -> None:
        """One chunk: its new tokens over the cached prefix and themselves."""
        kv = self.gather(call, buffer, kv_scale)
        chunk = q[call.first_token : call.end_token].to(call.dtype).transpose(0, 1).unsqueeze(0)
        attended = self.attend(chunk, kv[0], kv[1], call.mask, is_causal=call.mask is None)
        shape = (-1, self.need.num_q_heads, self.need.head_dim)
        out[call.first_token : call.end_token].view(shape).copy_(attended[0].transpose(0, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
        """q: [rows, heads, queries, head_dim] over k, v: [rows, num_kv_heads, keys, head_dim]."""
        need = self.need
        if need.softcap is None:
            # Repeating K and V for the query heads of a chunk measured as fast as avoiding it.
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=need.scale, enable_gqa=gqa)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(need.scale / need.softcap).tanh_().mul_(need.softcap)
        if is_causal:
            mask = causal_mask(q.shape[2], k.shape[2], 0, None, scores)
        if mask is not None:
            scores += mask
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def tile_view(kv_cache: Tensor) -> Tensor:
    """The storage from the layer view's first element on, cut into tiles: [num_tiles, `tile_size`]."""
    num_blocks, _, num_kv_heads, tokens_per_block, head_dim = kv_cache.shape
    size = tile_size(tokens_per_block, head_dim, kv_cache.dtype)
    last = (num_blocks - 1) * kv_cache.stride(0) + kv_cache.stride(1) + (num_kv_heads - 1) * kv_cache.stride(2)
    return kv_cache.as_strided((last // size + 1, size), (size, 1))


def causal_mask(num_queries: int, num_keys: int, offset: int, window: int | None, like: Tensor) -> Tensor:
    """[num_queries, num_keys] to add to scores; key j stands at position j, query i at offset + i."""
    position = torch.arange(offset, offset + num_queries, device=like.device).unsqueeze(1)
    key = torch.arange(num_keys, device=like.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


class Planner:
    """Works out a step's `Plan`."""

    def __init__(self, backend: VanillaAttention, kv_cache: Tensor, metadata: AttentionMetadata, group: int) -> None:
        need = backend.need
        self.need = need
        self.group_size = backend.group_size
        self.long_prefill_dtype = backend.long_prefill_dtype
        self.kv_cache = kv_cache
        self.compute_dtype = backend.compute_dtype
        self.starts = metadata.query_start_loc.tolist()
        self.lens = metadata.seq_lens.tolist()
        self.block_table = metadata.block_tables[group]
        self.row_indices: dict[int, Tensor] = {}
        size = self.tile_size = tile_size(kv_cache.shape[3], kv_cache.shape[4], kv_cache.dtype)
        self.tokens_per_block = kv_cache.shape[3]
        self.block_stride = kv_cache.stride(0) // size
        kv = torch.arange(2, device=kv_cache.device).view(2, 1, 1, 1) * (kv_cache.stride(1) // size)
        head = torch.arange(need.num_kv_heads, device=kv_cache.device).view(-1, 1) * (kv_cache.stride(2) // size)
        self.tile_in_block = kv + head
        # As numbers: of a copied row, and of what is multiplied.
        row_bytes = 2 * need.num_kv_heads * kv_cache.shape[3] * kv_cache.shape[4] * self.compute_dtype.itemsize
        self.row_bytes = row_bytes
        self.group_blocks = GROUP_BYTES // row_bytes

    def plan(self) -> Plan:
        """Decode rows in groups, prefill chunks one by one; rows without new tokens have no part."""
        rows = [row for row, length in enumerate(self.lens) if length and self.starts[row + 1] > self.starts[row]]
        chunks = [row for row in rows if self.starts[row + 1] - self.starts[row] > 1]
        singles = [row for row in rows if self.starts[row + 1] - self.starts[row] == 1] if chunks else rows
        copied = self.rows_to_copy(singles)
        singles = [row for row in singles if row not in copied] if copied else singles
        decode = [self.decode_call(group) for group in self.groups(singles)]
        prefill = [self.prefill_call(row) for row in chunks]
        most = max((call.index.shape[0] for call in decode + prefill), default=0)
        rows_copied = [self.copied_row(row) for row in copied]
        return Plan(
            rows_copied,
            decode,
            prefill,
            self.kv_cache.new_empty(most, self.tile_size),
            self,
        )

    def rows_to_copy(self, rows: list[int]) -> list[int]:
        """The decode rows that attend from copies: long ones, on the CPU, while all copies fit."""
        if self.need.window is not None or self.kv_cache.is_cuda:
            return []
        token_bytes = self.row_bytes // self.tokens_per_block
        copied = [row for row in rows if self.lens[row] * token_bytes >= MIN_COPY_BYTES]
        fits = sum(self.lens[row] + SLACK for row in copied) * token_bytes <= MAX_COPY_BYTES
        return copied if fits else []

    def copied_row(self, row: int) -> CopiedRow:
        """Where a copied row's new token lies, and the one before it."""
        last = self.lens[row] - 1
        size, blocks = self.tokens_per_block, self.block_table[row]
        block = int(blocks[last // size])
        before = block if last % size else int(blocks[last // size - 1]) if last else -1
        return CopiedRow(row, self.starts[row], last + 1, block, before, last % size)

    def row_index(self, row: int) -> Tensor:
        """The tiles of one whole row."""
        if row not in self.row_indices:
            end = cdiv(self.lens[row], self.tokens_per_block)
            self.row_indices[row] = self.index(self.block_table[row : row + 1, :end].long())
        return self.row_indices[row]

    def first_key(self, row: int) -> int:
        """The first position that any of a row's new tokens sees."""
        first_query = self.lens[row] - (self.starts[row + 1] - self.starts[row])
        return 0 if self.need.window is None else max(0, first_query + 1 - self.need.window)

    def blocks(self, row: int) -> tuple[int, int]:
        """The row's blocks to copy: first, and one past the last."""
        return self.first_key(row) // self.tokens_per_block, cdiv(self.lens[row], self.tokens_per_block)

    def groups(self, rows: list[int]) -> list[list[int]]:
        """Neighbouring rows while their padded copies fit in GROUP_BYTES."""
        groups: list[list[int]] = []
        most = 0
        for row in rows:
            begin, end = self.blocks(row)
            most = max(most, end - begin)
            if groups and groups[-1][-1] == row - 1 and most * (len(groups[-1]) + 1) <= self.group_blocks:
                groups[-1].append(row)
            else:
                groups.append([row])
                most = end - begin
        return groups

    def index(self, block_ids: Tensor) -> Tensor:
        """block_ids: int64 [num_rows, num_blocks] -> which tiles to copy, as `Call.index` orders them."""
        return (block_ids.view(1, block_ids.shape[0], 1, -1) * self.block_stride + self.tile_in_block).flatten()

    def decode_call(self, rows: list[int]) -> Call:
        """Rows of one new token each."""
        first, last = rows[0], rows[-1]
        begins, ends = zip(*(self.blocks(row) for row in rows), strict=True)
        num_blocks = max(end - begin for begin, end in zip(begins, ends, strict=True))
        device = self.kv_cache.device
        if len(rows) == 1:
            block_ids = self.block_table[first : first + 1, begins[0] : ends[0]].long()
            skipped = begins[0] * self.tokens_per_block
            begin, end = self.first_key(first) - skipped, self.lens[first] - skipped
            mask = None
        else:
            skipped = torch.tensor(begins, device=device).unsqueeze(1)
            # A short row repeats its last block; the mask hides it.
            column = skipped + torch.arange(num_blocks, device=device)
            column = column.minimum(torch.tensor(ends, device=device).unsqueeze(1) - 1)
            block_ids = self.block_table[first : last + 1].long().gather(1, column)
            begin, end = 0, num_blocks * self.tokens_per_block
            key = skipped * self.tokens_per_block + torch.arange(end, device=device)
            first_keys = torch.tensor([self.first_key(row) for row in rows], device=device).unsqueeze(1)
            hidden = (key >= torch.tensor([self.lens[row] for row in rows], device=device).unsqueeze(1)) | (
                key < first_keys
            )
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
            # Written out for all heads: a broadcast mask costs the call up to a half more.
            shape = (len(rows), self.need.num_kv_heads, self.group_size, end)
            mask = mask.to(self.compute_dtype).view(-1, 1, 1, end).expand(shape).contiguous()
        index = self.index(block_ids)
        tokens = self.starts[first], self.starts[last + 1]
        return Call(*tokens, len(rows), index, begin, end, mask, self.compute_dtype)

    def prefill_call(self, row: int) -> Call:
        """One chunk."""
        start, end_token = self.starts[row], self.starts[row + 1]
        num_new, length = end_token - start, self.lens[row]
        first_block, end_block = self.blocks(row)
        dtype = self.compute_dtype
        if self.long_prefill_dtype is not None and num_new >= MIN_BF16_TOKENS:
            dtype = self.long_prefill_dtype
        first_key = self.first_key(row)
        begin = first_key - first_block * self.tokens_per_block
        window = self.need.window
        mask = None
        if num_new < length or (window is not None and length > window):
            like = torch.empty(0, dtype=dtype, device=self.kv_cache.device)
            mask = causal_mask(num_new, length - first_key, length - num_new - first_key, window, like)
        index = self.index(self.block_table[row : row + 1, first_block:end_block].long())
        return Call(start, end_token, 1, index, begin, begin + length - first_key, mask, dtype)
