# SPDX-License-Identifier: Apache-2.0
"""What lies between the QKV product and attention, in one op: q/k norm, rotary embedding, writing K and V."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.kv_quant import layer_view, tile_size, to_fp8, to_int8, token_scales
from headrace.kernels.op import Case, on_cuda, op

FEW_TOKENS = 4
"""Up to so many tokens, copying one by one into the cache beats an index_put_ (measured on a Zen 4 core)."""

# num_q_heads, num_kv_heads, head_dim, rot_dim (0: no rotary), q/k norm, norm offset
SHAPES = (
    (9, 3, 64, 64, False, 0.0),
    (4, 1, 256, 256, True, 1.0),
    (8, 2, 128, 128, True, 0.0),
    (4, 4, 80, 32, False, 0.0),
    (6, 2, 96, 96, False, 0.0),
    (4, 2, 64, 0, True, 0.0),
    (2, 1, 64, 0, False, 0.0),
)


def qk_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Every combination of norm and rotary a model uses; a strided cache of several layers; skipped slots."""
    for q_heads, kv_heads, dim, rot_dim, has_norm, offset in SHAPES:
        for num_tokens in (1, 7):
            generator = torch.Generator().manual_seed(q_heads * dim + num_tokens)
            qkv = torch.randn(num_tokens, (q_heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype)
            norms = torch.randn(2, dim, generator=generator).to(device, dtype) if has_norm else (None, None)
            angles = torch.rand(64, rot_dim // 2, generator=generator) * 6
            table = torch.cat((angles.cos(), angles.sin()), -1).to(device) if rot_dim else None
            positions = torch.randint(0, 64, (num_tokens,), generator=generator).to(device)
            # 6 blocks of 16 tokens over 3 layers; this is layer 1.
            arena = torch.zeros(6, 3, 2, kv_heads, 16, dim, device=device, dtype=dtype)
            slots = torch.randperm(6 * 16, generator=generator)[:num_tokens]
            slots[num_tokens // 2 + 1 :: 3] = -1
            args = (qkv, norms[0], norms[1], 1e-6, table, positions, arena[:, 1], slots.to(device))
            name = f"{q_heads}/{kv_heads}x{dim}r{rot_dim}n{has_norm:d}t{num_tokens}"
            yield Case(name, (*args, q_heads, kv_heads, dim, offset), 2 * qkv.nbytes)
    if dtype == torch.float32:
        yield from quantized_cases(device)


def quantized_cases(device: str) -> Iterator[Case]:
    """8-bit caches, of heads with and without a part that is not turned; numbers from tiny to over what e4m3 holds."""
    for kv_dtype in (torch.uint8, torch.int8):
        for q_heads, kv_heads, dim, rot_dim in ((8, 2, 128, 128), (4, 4, 80, 32), (2, 1, 64, 0)):
            generator = torch.Generator().manual_seed(dim)
            qkv = torch.randn(9, (q_heads + 2 * kv_heads) * dim, generator=generator)
            qkv[:, q_heads * dim :] *= torch.logspace(-6, 4, 9).unsqueeze(1)
            qkv[3] = 0.0
            angles = torch.rand(64, rot_dim // 2, generator=generator) * 6
            table = torch.cat((angles.cos(), angles.sin()), -1).to(device) if rot_dim else None
            positions = torch.randint(0, 64, (9,), generator=generator).to(device)
            size = tile_size(16, dim, kv_dtype)
            arena = torch.zeros(6, 3, 2, kv_heads, size, device=device, dtype=kv_dtype)
            slots = torch.randperm(6 * 16, generator=generator)[:9]
            slots[5] = -1
            args = (qkv.to(device), None, None, 1e-6, table, positions, layer_view(arena, 1, 16, dim), slots.to(device))
            scale = 0.05 + torch.rand(2, kv_heads, generator=generator).to(device)
            name = f"{q_heads}/{kv_heads}x{dim}r{rot_dim} {kv_dtype}"
            yield Case(name, (*args, q_heads, kv_heads, dim, 0.0, scale if kv_dtype == torch.uint8 else None))


def write_cache(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None) -> None:
    """kv: fp32 [num_tokens, 2, num_kv_heads, head_dim] into the layer's view; slot -1 writes nothing."""
    if kv_cache.dtype == torch.int8:
        kv, scales = to_int8(kv)
        _write(scales, token_scales(kv_cache), slot_mapping)
    elif kv_cache.dtype == torch.uint8:
        assert kv_scale is not None, "an fp8 cache has scales"
        kv = to_fp8(kv, kv_scale)
    _write(kv, kv_cache, slot_mapping)


def _write(new: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """new: [num_tokens, 2, num_kv_heads, ...] into cache [num_blocks, 2, num_kv_heads, tokens_per_block, ...]."""
    tokens_per_block = cache.shape[3]
    if new.shape[0] <= FEW_TOKENS and not new.is_cuda:
        for index, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // tokens_per_block, :, :, slot % tokens_per_block] = new[index]
        return
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    block = torch.div(slots, tokens_per_block, rounding_mode="floor")
    # The two index tensors are parted by slices, so their dimension comes first: [kept, 2, num_kv_heads, ...].
    cache[block, :, :, slots % tokens_per_block] = new[kept].to(cache.dtype)


def rotate_(x: Tensor, cos_sin: Tensor) -> None:
    """Neox rotary in place. x: fp32 [num_tokens, heads, rot_dim]; cos_sin: [num_tokens, rot_dim], cosines first."""
    half = x.shape[-1] // 2
    cos, sin = torch.split(cos_sin.unsqueeze(1), half, -1)
    first, second = torch.split(x, half, -1)
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)


@op(cases=qk_cases)
def qk_norm_rope_cache_write(
    qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor | None,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_offset: float = 0.0,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """RMSNorm each q and k head, turn them by their position, write k and v to the cache. Returns q.

    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], left as it was. q_norm_weight, k_norm_weight:
    [head_dim], or None for no norm. cos_sin_cache: fp32 [max_position, rot_dim], cosines then sines, each rot_dim / 2;
    the first rot_dim of head_dim are turned, halves paired (neox); None turns nothing. positions, slot_mapping:
    int64 [num_tokens]; slot -1 writes nothing. kv_cache: the layer's view [num_blocks, 2, num_kv_heads,
    tokens_per_block, head_dim], any strides with a last one of 1, plain or of 8 bits (`kernels/kv_quant.py`).
    norm_offset: 1.0 for Gemma. kv_scale: fp32 [2, num_kv_heads], an fp8 cache's.
    Returns q [num_tokens, num_q_heads, head_dim], in fp32 when the cache is fp32, else in qkv's dtype.
    """
    num_tokens = qkv.shape[0]
    heads = qkv.to(torch.float32, copy=True).view(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k = heads[:, :num_q_heads], heads[:, num_q_heads : num_q_heads + num_kv_heads]
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        if weight is not None:
            x.copy_(F.rms_norm(x, (head_dim,), weight.float() + norm_offset, eps))
    if cos_sin_cache is not None:
        rot_dim = cos_sin_cache.shape[1]
        rotate_(heads[:, : num_q_heads + num_kv_heads, :rot_dim], cos_sin_cache.index_select(0, positions))
    kv = heads[:, num_q_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
    write_cache(kv, kv_cache, slot_mapping, kv_scale)
    return q if kv_cache.dtype == torch.float32 else q.to(qkv.dtype)


qk_norm_rope_cache_write.impl("triton", on_cuda, "headrace.kernels.rope_triton:qk_norm_rope_cache_write")
