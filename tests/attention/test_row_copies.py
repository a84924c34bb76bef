# SPDX-License-Identifier: Apache-2.0
"""VANILLA keeps copies of rows from step to step: they must follow whatever the scheduler does to rows and blocks."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from headrace.attention import reference, row_copies
from headrace.attention.base import DTYPES, AttentionMetadata, AttentionNeed
from headrace.attention.reference import VanillaAttention
from headrace.kernels.kv_quant import is_quantized, layer_view, read_token, stored_dtype, tile_size
from headrace.kernels.rope import write_cache

HEADS, KV_HEADS, DIM, SIZE, BLOCKS, LAYERS = 4, 2, 16, 4, 40, 2
NEED = AttentionNeed(HEADS, KV_HEADS, DIM, 0.25, dtype="float32", kv_dtype="float32", tokens_per_block=SIZE)


@dataclass
class Row:
    """A request as the test knows it: its blocks, and its true K and V of each layer."""

    blocks: list[int] = field(default_factory=list)
    kv: list[Tensor] = field(default_factory=list)
    """[LAYERS, 2, KV_HEADS, DIM] per token."""


class World:
    """An arena, rows that come and go, and a backend per layer."""

    def __init__(self, seed: int, kv_dtype: str = "float32") -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        stored = stored_dtype(DTYPES[kv_dtype])
        arena = torch.zeros(BLOCKS, LAYERS, 2, KV_HEADS, tile_size(SIZE, DIM, stored), dtype=stored)
        self.layers = [layer_view(arena, layer, SIZE, DIM) for layer in range(LAYERS)]
        self.backends = [VanillaAttention(replace(NEED, kv_dtype=kv_dtype)) for _ in range(LAYERS)]
        self.kv_scale = torch.tensor([[0.5, 0.25], [2.0, 0.125]]) if kv_dtype == "fp8" else None
        self.free = list(range(BLOCKS))
        self.rows: list[Row] = []

    def append(self, row: Row, num_tokens: int) -> None:
        """Give a row tokens, and write them into its blocks."""
        for _ in range(num_tokens):
            at = len(row.kv)
            if at % SIZE == 0:
                row.blocks.append(self.free.pop())
            token = torch.randn(LAYERS, 2, KV_HEADS, DIM, generator=self.generator)
            block, offset = row.blocks[at // SIZE], at % SIZE
            for layer, cache in enumerate(self.layers):
                write_cache(token[layer][None], cache, torch.tensor([block * SIZE + offset]), self.kv_scale)
                if is_quantized(cache):
                    token[layer] = read_token(cache, block, offset, self.kv_scale)
            row.kv.append(token)

    def finish(self, row: Row) -> None:
        """Free a row's blocks so that the next row takes the very same ones, in the same order."""
        self.rows.remove(row)
        self.free += reversed(row.blocks)

    def step(self, rows: list[Row], counts: list[int]) -> None:
        """Run a step in which each row has got so many new tokens, and check it."""
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        lens = [len(row.kv) for row in rows]
        table = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.blocks)] = torch.tensor(row.blocks)
        metadata = AttentionMetadata(
            num_tokens=sum(counts),
            num_rows=len(rows),
            num_decode_rows=sum(count == 1 for count in counts),
            first_prefill_row=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(lens),
            query_start_loc=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            positions=torch.zeros(sum(counts), dtype=torch.long),
            block_tables=(table,),
            slot_mapping=(torch.zeros(sum(counts), dtype=torch.long),),
        )
        q = torch.randn(sum(counts), HEADS, DIM, generator=self.generator)
        for layer, backend in enumerate(self.backends):
            got = backend.forward(q, self.layers[layer], metadata, 0, self.kv_scale)
            for index, row in enumerate(rows):
                # The row's last new token sees everything.
                token = int(starts[index + 1]) - 1
                k, v = torch.stack(row.kv)[:, layer].permute(1, 2, 0, 3).repeat_interleave(HEADS // KV_HEADS, 1)
                weights = (torch.einsum("hd,hkd->hk", q[token], k) * NEED.scale).softmax(-1)
                expected = torch.einsum("hk,hkd->hd", weights, v).flatten()
                torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-5)

    def random_step(self) -> None:
        """Some rows finish, some start, some decode, some sit the step out."""
        for row in [row for row in self.rows if self.random.random() < 0.08]:
            self.finish(row)
        prefills: list[tuple[Row, int]] = []
        while len(self.free) > 12 and self.random.random() < 0.4:
            row, num_tokens = Row(), self.random.randint(2, 11)
            self.append(row, num_tokens)
            prefills.append((row, num_tokens))
        self.random.shuffle(self.rows)
        decodes = [row for row in self.rows if self.random.random() < 0.9 and len(self.free) > 2]
        for row in decodes:
            self.append(row, 1)
        self.rows += [row for row, _ in prefills]
        if decodes or prefills:
            chosen = [*decodes, *(row for row, _ in prefills)]
            self.step(chosen, [1] * len(decodes) + [count for _, count in prefills])


@pytest.fixture
def copy_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MIN_COPY_BYTES", 0)
    monkeypatch.setattr(reference, "SLACK", 6)
    monkeypatch.setattr(row_copies, "SLACK", 6)


@pytest.mark.usefixtures("copy_everything")
@pytest.mark.parametrize(("seed", "kv_dtype"), [*((i, "float32") for i in range(4)), (4, "fp8"), (5, "int8")])
def test_copies_follow_rows_that_come_and_go(seed: int, kv_dtype: str) -> None:
    world = World(seed, kv_dtype)
    for _ in range(120):
        world.random_step()
    assert any(backend.copies.by_block for backend in world.backends), "no copy was ever kept"


@pytest.mark.usefixtures("copy_everything")
def test_a_new_row_in_a_freed_row_s_blocks_does_not_get_its_copy() -> None:
    """The new row has the same blocks and just the length that the old copy waits for."""
    world = World(0)
    first = Row()
    world.append(first, 6)
    world.rows.append(first)
    world.step([first], [6])
    world.append(first, 1)
    world.step([first], [1])
    blocks = list(first.blocks)
    world.finish(first)
    second = Row()
    world.append(second, 7)
    world.step([second], [7])
    world.append(second, 1)
    world.step([second], [1])
    assert second.blocks == blocks


@pytest.mark.usefixtures("copy_everything")
def test_a_decoding_row_is_gathered_once() -> None:
    world = World(0)
    row = Row()
    world.append(row, 9)
    world.step([row], [9])
    world.append(row, 1)
    world.step([row], [1])
    (copy,) = world.backends[0].copies.by_block.values()
    for _ in range(5):
        world.append(row, 1)
        world.step([row], [1])
    assert list(world.backends[0].copies.by_block.values()) == [copy]


def test_too_many_bytes_of_copies_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MIN_COPY_BYTES", 0)
    monkeypatch.setattr(reference, "MAX_COPY_BYTES", 1000)
    world = World(0)
    for _ in range(20):
        world.random_step()
    assert not world.backends[0].copies.by_block
