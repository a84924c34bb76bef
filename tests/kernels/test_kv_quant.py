# SPDX-License-Identifier: Apache-2.0
"""8-bit KV caches: what is written, byte for byte, and that nothing written is NaN or infinite."""

import importlib.util
import os

import pytest
import torch

from headrace.kernels.kv_quant import from_fp8, layer_view, read_tiles, tile_size, to_fp8, to_int8, token_scales
from headrace.kernels.rope import qk_norm_rope_cache_write

DEVICE = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
NAMES = [None, pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"))]
HEADS, SIZE, DIM = 2, 8, 64


def write(name: str | None, kv: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """K and V [tokens, 2, HEADS, DIM] through the op without norm or rotation, into every slot in order: the arena."""
    tokens = len(kv)
    arena = torch.zeros(-(-tokens // SIZE), 2, 2, HEADS, tile_size(SIZE, DIM, dtype), dtype=dtype, device=DEVICE)
    qkv = torch.cat((torch.zeros(tokens, HEADS, DIM), kv[:, 0], kv[:, 1]), 1).flatten(1).to(DEVICE)
    op = qk_norm_rope_cache_write
    function = op.reference if name is None else op.implementation(name)
    places = torch.arange(tokens, device=DEVICE)
    cache = layer_view(arena, 1, SIZE, DIM)
    scale = None if scale is None else scale.to(DEVICE)
    function(qkv, None, None, 1e-6, None, places, cache, places, HEADS, HEADS, DIM, 0.0, scale)
    return arena.cpu()


@pytest.mark.parametrize("name", NAMES)
def test_fp8_is_the_nearest_code_of_every_number(name: str | None) -> None:
    """Every code, every middle between two (ties go to even), and a little to each side of both."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    every = torch.cat((values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), values * (1 + 2**-20)))
    every = torch.cat((every, -every, torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 1e-2))
    kv = torch.nn.functional.pad(every, (0, -len(every) % (2 * HEADS * DIM))).view(-1, 2, HEADS, DIM)
    arena = write(name, kv, torch.uint8, torch.ones(2, HEADS))
    got = layer_view(arena, 1, SIZE, DIM).permute(0, 3, 1, 2, 4).flatten(0, 1)[: len(kv)]
    wanted = kv.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(from_fp8(got), from_fp8(wanted))
    assert not layer_view(arena, 0, SIZE, DIM).any(), "another layer was written"


def test_a_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    assert torch.equal(from_fp8(codes), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_what_cannot_be_held_saturates(name: str | None, dtype: torch.dtype) -> None:
    kv = torch.randn(11, 2, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    kv[1, 0, 0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e6, -1e6])
    kv[2] = torch.nan
    kv[3] = torch.inf
    kv[4] = 0.0
    scale = torch.tensor([[0.5, 1.0], [2.0, 0.1]]) if dtype == torch.uint8 else None
    arena = write(name, kv, dtype, scale)
    tiles = arena[:, 1].permute(1, 2, 0, 3)[:, None]
    found = read_tiles(tiles, SIZE, DIM, scale, torch.float32)[:, 0, :, :11].permute(2, 0, 1, 3)
    assert found.isfinite().all()
    assert not found[2].any()
    assert not found[4].any()
    assert (found[3] > 40).all()
    assert found[1, 0, 0, 0] > 200 > -200 > found[1, 0, 0, 1]
    plain = kv[5:] if scale is None else kv[5:] / scale[..., None]
    step = 2**-4 * plain.abs() if dtype == torch.uint8 else plain.abs().amax(-1, keepdim=True) * 0.006
    error = (found[5:] if scale is None else found[5:] / scale[..., None]) - plain
    assert (error.abs() <= step + 2**-10).all()


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_int8_and_its_scales_are_the_reference_s_bytes() -> None:
    kv = torch.randn(21, 2, HEADS, DIM, generator=torch.Generator().manual_seed(3)) * torch.logspace(-5, 3, DIM)
    assert torch.equal(write("triton", kv, torch.int8, None), write(None, kv, torch.int8, None))


def test_scales_lie_behind_their_head_s_tokens() -> None:
    """A block is [layers, 2, heads, tokens * dim int8 then tokens bf16], without a hole."""
    arena = torch.zeros(3, 2, 2, HEADS, tile_size(SIZE, DIM, torch.int8), dtype=torch.int8)
    assert arena[0].numel() == 2 * 2 * HEADS * SIZE * (DIM + 2)
    scales = token_scales(layer_view(arena, 1, SIZE, DIM))
    scales[2, 1, 0, 3] = 1.5
    at = arena[2, 1, 1, 0]
    assert at[SIZE * DIM :].view(torch.bfloat16)[3] == 1.5
    assert arena.count_nonzero() == at[SIZE * DIM :].count_nonzero() > 0
    layer_view(arena, 1, SIZE, DIM)[2, 1, 0] = 7
    assert scales[2, 1, 0].tolist() == [0, 0, 0, 1.5, 0, 0, 0, 0]


def test_int8_keeps_small_heads_beside_large_ones() -> None:
    kv = torch.randn(4, 2, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    kv[:, :, 1] *= 1e-4
    codes, scales = to_int8(kv)
    error = codes * scales.float().unsqueeze(-1) - kv
    assert (error.abs() < 0.01 * kv.abs().amax(-1, keepdim=True)).all()


def test_a_scale_is_per_head() -> None:
    kv = torch.full((1, 2, HEADS, DIM), 3.0)
    codes = to_fp8(kv, torch.tensor([[1.0, 3.0], [1.5, 6.0]]))
    assert from_fp8(codes)[0, :, :, 0].tolist() == [[3.0, 1.0], [2.0, 0.5]]
