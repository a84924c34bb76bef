# SPDX-License-Identifier: Apache-2.0
"""A long chunk cut into a few shapes attends to what the whole would; the same on the CPU by plain torch."""

import pytest
import torch
from torch import Tensor

from headrace.attention import long_chunk
from headrace.attention.base import AttentionNeed, LongChunk
from headrace.attention.long_chunk import LongPrefill, LongShapes, Shape, all_shapes, is_long, pieces, shapes_of

HEADS, KV_HEADS, DIM, PER_BLOCK = 4, 2, 16, 8


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """What cuDNN computes, causal from the top left."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    # Laid out as the queries are.
    out = (scores.softmax(-1) @ v.float()).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize(
    ("num_new", "length"), [(24, 24), (20, 20), (8, 8), (20, 45), (16, 64), (31, 100), (1, 90), (40, 41)]
)
def test_a_chunk_in_pieces_is_the_chunk_as_a_whole(num_new: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunk, "UNIT", 8)
    monkeypatch.setattr(long_chunk, "PIECES", (32, 16, 8))
    generator = torch.Generator().manual_seed(length)
    num_blocks = -(-length // PER_BLOCK)
    arena = torch.full((num_blocks + 3, 2, 2, KV_HEADS, PER_BLOCK, DIM), torch.nan)
    table = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks].int()
    kv = torch.randn(2, KV_HEADS, length, DIM, generator=generator)
    place = torch.arange(length)
    arena[table.long()[place // PER_BLOCK], 1, :, :, place % PER_BLOCK] = kv.permute(2, 0, 1, 3)
    before, after = 3, 2
    q = torch.randn(before + num_new + after, HEADS, DIM, generator=generator)
    out = torch.full((len(q), HEADS * DIM), 7.0)
    need = AttentionNeed(HEADS, KV_HEADS, DIM, DIM**-0.5, dtype="float32", kv_dtype="float32")
    asked: list[Shape] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
        asked.append(Shape(q.shape[2], k.shape[2], is_causal))
        return plain(q, k, v, scale, is_causal)

    LongPrefill(need, "cpu", attend).forward(q, arena[:, 1], table, LongChunk(5, before, num_new, length), out)
    k, v = kv.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = (q[before : before + num_new].transpose(0, 1) @ k.transpose(-1, -2)) * DIM**-0.5
    hidden = torch.arange(length)[None, :] > torch.arange(length - num_new, length)[:, None]
    expected = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out[before : before + num_new], expected, rtol=1e-5, atol=1e-5)
    assert (out[:before] == 7).all() and (out[before + num_new :] == 7).all()
    assert asked == shapes_of(num_new, length)


def test_every_shape_that_a_chunk_asks_for_is_built() -> None:
    built = set(all_shapes(8192, 40_960))
    for prefix in (0, 32, 1000, 1024, 8128, 24_576, 30_000):
        for num_new in (1025, 3000, 8000, 8192):
            if is_long(num_new, prefix + num_new):
                assert built.issuperset(shapes_of(num_new, prefix + num_new))
    assert len(built) <= 40


def test_pieces_are_the_whole_and_few() -> None:
    for prefix in range(0, 40_960, 1024):
        cut = pieces(prefix)
        assert sum(cut) == prefix
        assert len(cut) <= prefix // 8192 + 3


def test_a_short_chunk_or_one_of_few_pairs_is_not_long() -> None:
    assert not is_long(1024, 40_000)
    assert not is_long(2048, 2048)
    assert is_long(4096, 4096)
    assert is_long(2048, 16_384)


def test_nothing_is_taken_before_its_shapes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunk, "cudnn_attention", lambda *_: None)
    need = AttentionNeed(1, 1, 8, 1.0, dtype="float16", kv_dtype="float16")
    shapes = LongShapes([need], 8192, 16_384, torch.device("cpu"))
    assert not shapes.takes(4096, 4096)
    for _ in range(3):
        assert shapes.build_next()
    assert shapes.takes(4096, 4096) and not shapes.takes(8192, 8192)
    while shapes.build_next():
        pass
    assert shapes.takes(8192, 8192) and shapes.takes(5000, 16_000)


def test_likely_shapes_are_built_first_and_each_once() -> None:
    shapes = list(all_shapes(8192, 40_960))
    assert len(shapes) == len(set(shapes))
    assert [shape.is_causal for shape in shapes] == [True] * 8 + [False] * 32
    # The second chunk of a long prompt, then the chunks of steps that also decode.
    assert shapes[8] == Shape(8192, 8192, False)
    assert [shape.num_queries for shape in shapes[8::4]] == [8192, 9216, 2048, 3072, 4096, 5120, 6144, 7168]
    assert list(all_shapes(8192, 4096)) == [Shape(size, size, True) for size in (2048, 3072, 4096)]


def test_a_model_that_it_does_not_serve_has_no_long_chunks() -> None:
    shapes = LongShapes([], 8192, 16_384, torch.device("cpu"))
    assert not shapes.build_next()
    assert not shapes.takes(8192, 8192)


def test_a_cudnn_that_fails_costs_the_fast_path_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no valid execution plan")

    monkeypatch.setattr(long_chunk, "cudnn_attention", lambda *_: None)
    need = AttentionNeed(1, 1, 8, 1.0, dtype="float16", kv_dtype="float16")
    shapes = LongShapes([need], 8192, 16_384, torch.device("cpu"))
    for _ in range(3):
        assert shapes.build_next()
    assert shapes.takes(4096, 4096)
    monkeypatch.setattr(long_chunk, "cudnn_attention", fails)
    assert not shapes.build_next()
    assert not shapes.build_next()
    assert not shapes.takes(4096, 4096)
