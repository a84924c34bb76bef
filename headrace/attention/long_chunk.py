# SPDX-License-Identifier: Apache-2.0
"""Long prefill chunks through cuDNN's attention.

On an H200, 32/8 heads of 128: cuDNN reaches 540 TFLOP/s over 5k and more causal tokens and 620 to 680 over a prefix,
our kernel 334; below some 3k tokens ours is as fast. cuDNN builds a plan for every shape it has not seen (40 to 70 ms),
so a chunk is cut to a few shapes, all of which are built before they are used (`LongShapes`):

- The new tokens, with enough of the prefix before them to leave a multiple of UNIT, form a square: causal, padded at
  its end to a multiple of UNIT. Queries of the prefix in it are zeros, whose results are dropped.
- What is left of the prefix is cut into pieces, the largest first; each is attended to whole and merged by its
  logarithm of the sum of exp.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.attention.base import DTYPES, AttentionNeed, LongChunk
from headrace.kernels.kv_cache import gather_row
from headrace.kernels.merge import merge_attention
from headrace.logger import get_logger
from headrace.utils.math import round_down, round_up

logger = get_logger(__name__)

UNIT = 1024
PIECES = (8192, 4096, 2048, 1024)
"""Keys of a piece of the prefix."""
MIN_NEW_TOKENS = 1025
MIN_PAIRS = 4_500_000
"""Pairs of query and key from which on cuDNN is faster, its gathers and copies counted."""


class Shape(NamedTuple):
    """One call: queries, keys, and whether it is the causal square."""

    num_queries: int
    num_keys: int
    is_causal: bool


Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(q [1, heads, n, d], k, v [1, kv_heads, m, d], scale, is_causal) -> (out like q, lse fp32 [1, heads, n, 1])."""


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's kernel; k and v may have fewer heads."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def serves(need: AttentionNeed, device: torch.device) -> bool:
    """Whether a layer's long chunks may go through cuDNN: measured faster on compute capability 9.0 only."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    plain = need.window is None and need.softcap is None and need.dtype != "float32"
    gathers = need.kv_dtype in (need.dtype, "fp8", "int8")
    return plain and gathers and need.head_dim <= 128 and need.head_dim % 8 == 0


def is_long(num_new: int, length: int) -> bool:
    """Whether a chunk of `num_new` tokens, at the end of `length`, is worth it."""
    return num_new >= MIN_NEW_TOKENS and num_new * (length - num_new // 2) >= MIN_PAIRS


def pieces(prefix: int) -> list[int]:
    """A multiple of UNIT in pieces."""
    cut = []
    for piece in PIECES:
        cut += [piece] * (prefix // piece)
        prefix %= piece
    return cut


def shapes_of(num_new: int, length: int) -> list[Shape]:
    """The calls of a chunk, the square first."""
    prefix = length - num_new
    whole = round_down(prefix, UNIT)
    square = round_up(length - whole, UNIT)
    return [Shape(square, square, True)] + [Shape(square, piece, False) for piece in pieces(whole)]


def all_shapes(max_num_tokens: int, max_seq_len: int) -> Iterator[Shape]:
    """Every shape that a chunk can have, the likely ones first.

    Squares before all, as every long prompt begins with one. A later chunk needs its square beside all pieces: the
    largest chunk's first, with which a long prompt goes on; then small ones up, which steps that also decode cut, and
    which end a prompt.
    """
    largest = round_up(min(max_num_tokens + UNIT, max_seq_len), UNIT)
    squares = range(2 * UNIT, largest + 1, UNIT)
    yield from (Shape(size, size, True) for size in squares)
    if max_seq_len > max_num_tokens:
        whole = [size for size in (round_down(max_num_tokens, UNIT), largest) if size in squares]
        for size in dict.fromkeys([*whole, *squares]):
            yield from (Shape(size, piece, False) for piece in PIECES if piece < max_seq_len)


class LongShapes:
    """The shapes that are built already."""

    def __init__(self, needs: list[AttentionNeed], max_num_tokens: int, max_seq_len: int, device: torch.device) -> None:
        """needs: of the layers that cuDNN serves, each once; none: no chunk is long."""
        self._needs = needs
        self._device = device
        self._to_build = list(all_shapes(max_num_tokens, max_seq_len))[::-1] if needs else []
        self._ready: set[Shape] = set()

    def takes(self, num_new: int, length: int) -> bool:
        """Whether a chunk goes through cuDNN now."""
        return bool(self._ready) and is_long(num_new, length) and self._ready.issuperset(shapes_of(num_new, length))

    def build_next(self) -> bool:
        """Build one more shape. False: there is none left."""
        if not self._to_build:
            return False
        shape = self._to_build.pop()
        try:
            self._build(shape)
        except RuntimeError as error:
            # No cuDNN here, or none that takes the model: our own kernel serves every chunk.
            self._to_build.clear()
            self._ready.clear()
            logger.warning("Long prompts do without cuDNN's attention, which failed: %s", error)
            return False
        self._ready.add(shape)
        return True

    def _build(self, shape: Shape) -> None:
        for need in self._needs:
            dtype = DTYPES[need.dtype]
            q = torch.zeros(shape.num_queries, need.num_q_heads, need.head_dim, dtype=dtype, device=self._device)
            kv = torch.zeros(2, need.num_kv_heads, shape.num_keys, need.head_dim, dtype=dtype, device=self._device)
            cudnn_attention(q.transpose(0, 1)[None], kv[:1], kv[1:], need.scale, shape.is_causal)


class LongPrefill:
    """One layer's."""

    def __init__(self, need: AttentionNeed, device_type: str, attend: Attend = cudnn_attention) -> None:
        self._need = need
        self._attend = attend
        self._gather: Callable[..., Tensor] = gather_row.choose(device_type)
        self._merge: Callable[..., object] = merge_attention.choose(device_type)

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        table: Tensor,
        chunk: LongChunk,
        out: Tensor,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Attend a chunk's tokens and write their places in `out` [tokens, heads * head_dim].

        q: [tokens, heads, head_dim] of the whole step. table: int32 [max_blocks], the row's blocks.
        """
        need, num_new = self._need, chunk.num_new
        whole = round_down(chunk.length - num_new, UNIT)
        square = round_up(chunk.length - whole, UNIT)
        lead = chunk.length - num_new - whole
        own = q[chunk.first_token : chunk.first_token + num_new]
        if square != num_new:
            padded = q.new_zeros(square, need.num_q_heads, need.head_dim)
            padded[lead : lead + num_new] = own
            own = padded
        query = own.transpose(0, 1)[None]
        kv = self._gather(kv_cache, table, chunk.length, whole + square, q.dtype, kv_scale)
        found, lse = self._attend(query, kv[:1, :, whole:], kv[1:, :, whole:], need.scale, True)
        attended, lse = found[0].transpose(0, 1), lse.view(need.num_q_heads, square)
        begin = 0
        for piece in pieces(whole):
            end = begin + piece
            other, other_lse = self._attend(query, kv[:1, :, begin:end], kv[1:, :, begin:end], need.scale, False)
            self._merge(attended, lse, other[0].transpose(0, 1), other_lse.view(need.num_q_heads, square))
            begin = end
        target = out[chunk.first_token : chunk.first_token + num_new]
        target.view(num_new, need.num_q_heads, need.head_dim).copy_(attended[lead : lead + num_new])
