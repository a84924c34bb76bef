# SPDX-License-Identifier: Apache-2.0
"""Triton: 8-bit KV caches inside other kernels. The layouts are `kernels/kv_quant.py`'s.

A kernel's constant KV says what its cache holds: "plain" numbers, "fp8" codes, "fp8_native" codes on a GPU that
converts e4m3 itself (from compute capability 8.9 on), or "int8" numbers.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


def kv_kind(kv_cache: Tensor) -> str:
    """What a kernel's KV is for this cache, on its device."""
    if kv_cache.dtype == torch.int8:
        return "int8"
    if kv_cache.dtype == torch.uint8:
        return "fp8_native" if kv_cache.is_cuda and _converts_e4m3(kv_cache.get_device()) else "fp8"
    return "plain"


@functools.cache
def _converts_e4m3(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


@triton.jit
def from_fp8(codes, KV: tl.constexpr):
    """e4m3 codes (uint8) as fp16, exactly."""
    if KV == "fp8_native":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # Sign, exponent and mantissa moved to where fp16 has its own are 256 times too small, subnormal numbers too.
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def finite(x):
    """fp32 without NaN (0) and infinity (a large number)."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -1e30), 1e30)


@triton.jit
def to_fp8(x):
    """fp32 as e4m3 codes (uint8): the nearest, the even one of two, saturated; NaN as 0. For any GPU."""
    size = tl.minimum(tl.abs(finite(x)), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the codes count 512ths: that is what is left in the last bits of a number of 2**14.
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, tiny, normal) | sign).to(tl.uint8)


@triton.jit
def to_int8(x):
    """fp32 from about -127 to 127 as int8: the nearest, the even one of two."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # Added to 1.5 * 2**23 a number leaves its whole part in the last bits.
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def int8_scale(most):
    """The scale (bf16, as uint16 bits) of numbers of which the largest is `most`, and 1 / it."""
    most = tl.minimum(tl.maximum(most, 1e-30), 1e30)
    bits = (most * (1 / 127.0)).to(tl.uint32, bitcast=True)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return kept.to(tl.uint16), tl.div_rn(1.0, (kept << 16).to(tl.float32, bitcast=True))


@triton.jit
def load_scale(place, mask):
    """Scales at `place` (int8 pointers) as fp32; 0 where not `mask`."""
    bits = tl.load(place.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, other=0)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(place, scale, mask):
    """Write scales (uint16 bits) to `place` (int8 pointers)."""
    tl.store(place.to(tl.pointer_type(tl.uint16), bitcast=True), scale, mask=mask)
