# SPDX-License-Identifier: Apache-2.0
"""Unpacking of GGUF's tensor types. Rows are independent: any subset of a tensor's rows unpacks on its own."""

from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_numpy
from torch import Tensor

from headrace.errors import ModelLoadError

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUP = 32


@dataclass(frozen=True, slots=True)
class Affine4:
    """A 4-bit tensor: weight[n, k] = q[n, k] * scale[n, k // 32] + offset[n, k // 32]."""

    q: Tensor
    """uint8 [out, in], 0 to 15."""
    scale: Tensor
    """fp32 [out, in / 32]."""
    offset: Tensor
    """fp32 [out, in / 32]."""


def unpack(data: Tensor, kind: str) -> Tensor:
    """uint8 [rows, bytes per row] of type `kind` -> fp32 [rows, in]."""
    if kind in PLAIN:
        return data.contiguous().view(PLAIN[kind]).float()
    if kind == "Q8_0":
        blocks = data.reshape(len(data), -1, 34)
        values = blocks[..., 2:].view(torch.int8).float().mul_(_half(blocks, 0).unsqueeze(-1))
        return values.reshape(len(data), -1)
    affine = affine4(data, kind)
    if affine is not None:
        groups = affine.q.reshape(len(data), -1, GROUP).float()
        return groups.mul_(affine.scale.unsqueeze(-1)).add_(affine.offset.unsqueeze(-1)).reshape(len(data), -1)
    try:
        unpacked = dequantize_numpy(data.numpy(), GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError):
        raise ModelLoadError(f"tensors of the GGUF type {kind} cannot be unpacked.") from None
    return torch.from_numpy(unpacked).reshape(len(data), -1)


def affine4(data: Tensor, kind: str) -> Affine4 | None:
    """The 4-bit types whose values are affine in groups of 32 (Q4_0, Q4_1, Q4_K); None for every other type."""
    if kind == "Q4_0":
        blocks = data.reshape(len(data), -1, 18)
        scale = _half(blocks, 0)
        return Affine4(_nibbles(blocks[..., 2:]).flatten(1), scale, scale * -8.0)
    if kind == "Q4_1":
        blocks = data.reshape(len(data), -1, 20)
        return Affine4(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))
    return _affine4_k(data) if kind == "Q4_K" else None


def affine8(data: Tensor) -> Affine4:
    """Q8_0 as two 4-bit tensors side by side, [out, 2 * in]: the high halves of the bytes, then the low ones."""
    blocks = data.reshape(len(data), -1, 34)
    scale = _half(blocks, 0)
    # A signed byte plus 128: 16 * high + low - 128.
    raised = blocks[..., 2:] ^ 128
    return Affine4(
        torch.cat([(raised >> 4).flatten(1), (raised & 15).flatten(1)], dim=1),
        torch.cat([scale * 16.0, scale], dim=1),
        torch.cat([scale * -128.0, torch.zeros_like(scale)], dim=1),
    )


def _affine4_k(data: Tensor) -> Affine4:
    """Blocks of 256: fp16 scale and minimum, 8 pairs of 6 bits in 12 bytes, 4 runs of 32 bytes of 2 x 32 nibbles."""
    blocks = data.reshape(len(data), -1, 144)
    packed = blocks[..., 4:16]
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=-1)
    minima = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=-1)
    q = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Affine4(
        q.flatten(1),
        (scales.float() * _half(blocks, 0).unsqueeze(-1)).flatten(1),
        (minima.float() * -_half(blocks, 2).unsqueeze(-1)).flatten(1),
    )


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at byte `start` of each block, in fp32: [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def bytes_per_row(kind: str, in_features: int) -> int:
    """Size of one packed row."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return in_features // block * size
