# SPDX-License-Identifier: Apache-2.0
"""How a KV cache of 8 bits is laid out, written and read; other caches hold plain numbers.

fp8 (a torch.uint8 cache): e4m3 codes. What they stand for is multiplied by a scale per KV head of the layer, one for
keys and one for values, which comes with the checkpoint or is 1.

int8 (a torch.int8 cache): whole numbers from -127 to 127, with a scale per token and head that is found when the token
is written. So it needs no calibration, and a large key costs no other token its precision. The scales, bf16, follow
the tokens of their head: `tokens_per_block * head_dim` bytes of numbers, then `2 * tokens_per_block` of scales. A
block stays contiguous and moves in one copy, and a head's part of it is still one slice.

Nothing written is NaN or infinite: large numbers saturate, and NaN becomes 0.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT8_MAX = 127.0
SCALE_BYTES = 2
SMALLEST = 1e-30
LARGEST = 1e30
"""Of a head's largest number, as its int8 scale is made from it."""


def is_quantized(kv_cache: Tensor) -> bool:
    """Whether a cache holds codes of 8 bits."""
    return kv_cache.dtype in (torch.uint8, torch.int8)


def stored_dtype(kv_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache's storage: bytes for e4m3, for which torch has few operations."""
    return torch.uint8 if kv_dtype == torch.float8_e4m3fn else kv_dtype


def tile_size(tokens_per_block: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a head's keys, or its values, take of a block."""
    return tokens_per_block * (head_dim + (SCALE_BYTES if dtype == torch.int8 else 0))


def layer_view(arena: Tensor, layer: int, tokens_per_block: int, head_dim: int) -> Tensor:
    """A layer's [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim] of an arena [num_blocks, num_layers, 2,
    num_kv_heads, `tile_size`]."""
    return arena[:, layer, :, :, : tokens_per_block * head_dim].unflatten(-1, (tokens_per_block, head_dim))


def token_scales(kv_cache: Tensor) -> Tensor:
    """The scales of an int8 layer view: bf16 [num_blocks, 2, num_kv_heads, tokens_per_block], a view of it."""
    num_blocks, _, num_kv_heads, tokens_per_block, head_dim = kv_cache.shape
    halves = kv_cache.view(torch.bfloat16)
    first = halves.storage_offset() + tokens_per_block * head_dim // SCALE_BYTES
    size = (num_blocks, 2, num_kv_heads, tokens_per_block)
    return halves.as_strided(size, (*halves.stride()[:3], 1), first)


def to_fp8(kv: Tensor, kv_scale: Tensor) -> Tensor:
    """kv: fp32 [tokens, 2, num_kv_heads, head_dim]; kv_scale: fp32 [2, num_kv_heads] -> uint8 codes, like kv."""
    scaled = (kv * kv_scale.reciprocal().unsqueeze(-1)).nan_to_num_(0.0, E4M3_MAX, -E4M3_MAX)
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def to_int8(kv: Tensor) -> tuple[Tensor, Tensor]:
    """kv: fp32 [..., head_dim] -> int8 like kv, and its scales, bf16 [...]."""
    kv = kv.nan_to_num(0.0, LARGEST, -LARGEST)
    most = kv.abs().amax(-1, keepdim=True).clamp_(SMALLEST, LARGEST)
    # What is divided by is the scale as it is kept.
    scales = (most * (1 / INT8_MAX)).to(torch.bfloat16)
    codes = (kv * scales.float().reciprocal_()).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales.squeeze(-1)


def from_fp8(codes: Tensor) -> Tensor:
    """What e4m3 codes stand for, in fp32. Their bits, moved to where fp16 has its own, are 256 times too small; torch's
    own conversion takes twelve times as long on a CPU (6.0 against 0.5 ns a number on a Zen 4 core)."""
    bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-16512)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def read_tiles(
    tiles: Tensor, tokens_per_block: int, head_dim: int, kv_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Numbers of tiles [2, rows, num_kv_heads, blocks, `tile_size`] of a quantized cache, in `dtype`:
    [2, rows, num_kv_heads, blocks * tokens_per_block, head_dim]."""
    if tiles.dtype == torch.uint8:
        assert kv_scale is not None, "an fp8 cache has scales"
        found = from_fp8(tiles).flatten(3).unflatten(3, (-1, head_dim))
        return found.mul_(kv_scale.view(2, 1, -1, 1, 1)).to(dtype)
    size = tokens_per_block * head_dim
    codes = tiles[..., :size].unflatten(-1, (tokens_per_block, head_dim)).to(torch.float32)
    scales = tiles[..., size:].contiguous().view(torch.bfloat16).to(torch.float32)
    return codes.mul_(scales.unsqueeze(-1)).flatten(3, 4).to(dtype)


def read_token(kv_cache: Tensor, block: int, offset: int, kv_scale: Tensor | None) -> Tensor:
    """One token's K and V of a quantized cache, in fp32: [2, num_kv_heads, head_dim]."""
    codes = kv_cache[block, :, :, offset]
    if kv_cache.dtype == torch.uint8:
        assert kv_scale is not None, "an fp8 cache has scales"
        return from_fp8(codes).mul_(kv_scale.unsqueeze(-1))
    return codes.to(torch.float32).mul_(token_scales(kv_cache)[block, :, :, offset].to(torch.float32).unsqueeze(-1))
