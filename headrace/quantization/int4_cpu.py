# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU: 4-bit weights for few rows, bf16 weights in oneDNN's layout for many.

8-bit weights (Q8_0) are two 4-bit ones, by the same product, for half as many rows. A head in Q8_0 is multiplied in
8 bits by oneDNN: at a cold cache, where decode finds it, SmolLM2's takes 1.3 to 1.6 ms up to 8 rows on a Sapphire
Rapids, 2.4 as two halves, and 1.8 to 3.6 in bf16.

Measured on 2 cores of a Zen 4 and of a Sapphire Rapids, SmolLM2's shapes: up to 4 rows torch's packed int4 product is
1.3 to 3 times as fast as bf16; from 8 rows on it falls behind (it unpacks the weight anew for every 4 rows), 5 times at
64. oneDNN's own weight layout saves bf16 a reorder at each call: 1.3 to 3 times as fast up to 16 rows.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.quantization.base import FusedCall, RawTensor, copy_weight
from headrace.quantization.gguf import GROUP, Affine4, affine4, affine8

FEW_ROWS = 4
# oneDNN picks a layout for about this many rows; one made for a single row costs up to 1.5 times at 8 and more.
LAYOUT_ROWS = 8
FEW_ROWS_INT8 = 16
# What is left of a rounded input is at most a half; times this it fills 8 bits.
MIDDLE = 128
"""Where 0 is in 8 bits without a sign."""
LOW_HALF = 254.0
# The int4 product takes outputs in blocks of 16.
OUTPUT_BLOCK = 16
# Outputs rounded to 8 bits at a time, while loading.
OUTPUTS_AT_ONCE = 4096


def has_fast_bf16() -> bool:
    """Whether the CPU multiplies in bf16; elsewhere oneDNN imitates it, and fp32 is 2 to 4 times as fast."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_int8() -> bool:
    """Whether the CPU has 8-bit dot products; elsewhere oneDNN's 8-bit product is slow."""
    return torch.cpu._is_vnni_supported()


def has_int4() -> bool:
    """Whether torch's packed int4 product is vectorised here."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")


class WideWeight:
    """A dense weight [out, in]: bf16 in oneDNN's layout, or plain fp32 where the CPU has no bf16 units."""

    _weight: Tensor

    def __init__(self, is_bf16: bool) -> None:
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        self._is_stored = False

    def store(self, weight: Tensor) -> None:
        """Take a weight of `self.dtype`; a second time into the same memory."""
        packed = weight
        if self.dtype == torch.bfloat16:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        if self._is_stored:
            self._weight.copy_(packed)
        else:
            self._weight, self._is_stored = packed, True

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in] -> [num_tokens, out], in x's dtype."""
        if self.dtype == torch.bfloat16:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
            return y
        return F.linear(x.float(), self._weight, None if bias is None else bias.float()).to(x.dtype)


class Int4Weight:
    """A 4-bit weight in torch's packed layout, or an 8-bit one as its two halves side by side.

    keeps_nibbles: it can be unpacked again, for many rows.
    """

    _packed: Tensor
    _scales_and_zeros: Tensor
    """bf16 [in / 32, out, 2]."""
    _nibbles: Tensor
    """uint8 [out, in / 2]: the even column in the low half."""

    def __init__(self, keeps_nibbles: bool, num_halves: int = 1) -> None:
        self.keeps_nibbles = keeps_nibbles
        self.num_halves = num_halves
        self.max_rows = FEW_ROWS // num_halves
        self._is_stored = False

    def store(self, parts: list[Affine4]) -> None:
        """Take the fused parts, one below the other; a second time into the same memory."""
        q = torch.cat([part.q for part in parts])
        scale = torch.cat([part.scale for part in parts])
        offset = torch.cat([part.offset for part in parts])
        # torch computes (q - 8) * scale + zero, zero in bf16: near 0 in this form, where bf16 is finest.
        zero = offset + 8.0 * scale
        packed = torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)
        scales_and_zeros = torch.stack([scale.t(), zero.t()], dim=-1).to(torch.bfloat16).contiguous()
        nibbles = q[:, ::2] | (q[:, 1::2] << 4) if self.keeps_nibbles else q.new_empty(0)
        if self._is_stored:
            self._packed.copy_(packed)
            self._scales_and_zeros.copy_(scales_and_zeros)
            self._nibbles.copy_(nibbles)
        else:
            self._packed, self._scales_and_zeros, self._nibbles = packed, scales_and_zeros, nibbles
            self._is_stored = True

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: bf16 [num_tokens, in] -> [num_tokens, out]. Reads the weight once for every 4 rows."""
        if self.num_halves == 2:
            x = torch.cat([x, x], dim=1)
        y = torch._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales_and_zeros)
        return y if bias is None else y.add_(bias)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, [out, in]."""
        out, half = self._nibbles.shape
        weight = torch.empty(out, half, 2, dtype=dtype)
        weight[..., 0] = self._nibbles & 15
        weight[..., 1] = self._nibbles >> 4
        groups = weight.view(out, -1, GROUP)
        scales = self._scales_and_zeros.transpose(0, 1).unsqueeze(-1).to(dtype)
        groups.sub_(8).mul_(scales[:, :, 0]).add_(scales[:, :, 1])
        return groups.view(out, 2 * half)


class Int8Weight:
    """A weight in 8 bits, one scale an output. An input row goes in as two of 8 bits, what the first leaves over in the
    second: the weight is read once either way, and outliers that stretch a row's scale cost the others nothing."""

    _packed: Tensor
    _scales: Tensor
    """fp32 [out]."""

    def __init__(self) -> None:
        self.max_rows = FEW_ROWS_INT8
        self._is_stored = False

    def store(self, weight: Tensor) -> None:
        """Take a weight [out, in] of any dtype; a second time into the same memory."""
        scales = weight.abs().amax(dim=1).float().div_(127.0).clamp_min_(1e-30)
        q = torch.empty(weight.shape, dtype=torch.int8)
        for start in range(0, len(q), OUTPUTS_AT_ONCE):
            part = slice(start, start + OUTPUTS_AT_ONCE)
            q[part] = (weight[part].float() / scales[part, None]).round_().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(q, [1, q.shape[1]])
        if self._is_stored:
            self._packed.copy_(packed)
            self._scales.copy_(scales)
        else:
            self._packed, self._scales, self._is_stored = packed, scales, True
            self._zeros = torch.zeros(len(q), dtype=torch.int32)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: bf16 [num_tokens, in] -> [num_tokens, out]."""
        largest = x.abs().amax(dim=1, keepdim=True).float().clamp_min_(1e-30)
        scaled = x * (127.0 / largest)
        high = scaled.round()
        # Unsigned: of signed inputs some CPUs with VNNI have no product but a reference one, hundreds of times slower.
        halves = torch.cat([high, scaled.sub_(high).mul_(LOW_HALF).round_()]).add_(MIDDLE).to(torch.uint8)
        of_input, of_weight = (1 / 127.0, MIDDLE), (self._packed, self._scales, self._zeros)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            halves, *of_input, *of_weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        rows = len(x)
        y = y[:rows].add_(y[rows:], alpha=1 / LOW_HALF).mul_(largest).to(x.dtype)
        return y if bias is None else y.add_(bias)


class CpuMethod:
    """The QuantMethod of bf16 models on a CPU, whatever type the checkpoint's tensors have.

    embeds: rows are looked up (an embedding); multiplies: the product is used (all but an untied embedding).
    keeps_wide: 4-bit layers keep a bf16 copy for many rows; without it they are unpacked at each such call.
    is_uniform: the bf16 copy is used for few rows too, and no other form is made.
    """

    _many: Callable[[Tensor, Tensor | None], Tensor]
    """The product for many rows."""
    _rows: Tensor
    """[vocab, hidden], for lookups."""

    def __init__(
        self,
        embeds: bool = False,
        multiplies: bool = True,
        keeps_wide: bool = True,
        is_bf16: bool | None = None,
        is_uniform: bool = False,
    ) -> None:
        self.embeds = embeds
        self.multiplies = multiplies
        self.keeps_wide = keeps_wide
        self.is_uniform = is_uniform
        self._wide = WideWeight(has_fast_bf16() if is_bf16 is None else is_bf16)
        self._parts: dict[int, Tensor | RawTensor] = {}
        self._few: Int4Weight | Int8Weight | None = None
        """For up to its `max_rows`."""
        self._has_rows = False

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Storage comes with the first load: its form follows the checkpoint's types."""
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype

    def load_shard(self, layer: nn.Module, weight: Tensor | RawTensor, shard: int) -> None:
        """Hold one part until its layer is complete (packed parts stay mapped from the file)."""
        self._parts[shard] = weight

    def finish(self, layer: nn.Module) -> None:
        """Build what `apply` and `embed` read."""
        parts = [self._parts[i] for i in range(len(self.out_features))]
        self._parts = {}
        affine, num_halves = self._affine_parts(parts)
        if affine:
            int4 = self._few
            if not isinstance(int4, Int4Weight) or int4.num_halves != num_halves:
                int4 = self._few = Int4Weight(not self.keeps_wide, num_halves)
            int4.store(affine)
            if not self.keeps_wide:
                self._many = partial(_multiply_unpacked, int4, self._wide.dtype)
                return
        # Without room for a second copy, an embedding multiplies by its own rows.
        packs = self.multiplies and (self.keeps_wide or not self.embeds)
        dense = torch.empty(sum(self.out_features), self.in_features, dtype=self._wide.dtype if packs else self.dtype)
        start = 0
        for part, rows in zip(parts, self.out_features, strict=True):
            copy_weight(dense[start : start + rows], part)
            start += rows
        if self._is_8_bit_head(parts):
            int8 = self._few = self._few if isinstance(self._few, Int8Weight) else Int8Weight()
            int8.store(dense)
        elif not affine:
            self._few = None
        if packs:
            self._wide.store(dense)
        if self.embeds:
            self._keep_rows(dense.to(self.dtype))
        self._many = self._wide.multiply if packs else self._multiply_rows

    def _is_8_bit_head(self, parts: list[Tensor | RawTensor]) -> bool:
        """An embedding that is also the head, stored in 8 bits, on a CPU that multiplies in 8."""
        is_head = self.embeds and self.multiplies and not self.is_uniform
        return is_head and has_int8() and all(isinstance(part, RawTensor) and part.kind == "Q8_0" for part in parts)

    def _affine_parts(self, parts: list[Tensor | RawTensor]) -> tuple[list[Affine4], int]:
        """The parts' 4-bit form and the number of halves; empty where they have none or the shape does not suit."""
        if self._is_8_bit_head(parts):
            return [], 1
        fits = has_int4() and sum(self.out_features) % OUTPUT_BLOCK == 0 and self.in_features % GROUP == 0
        raw = [part for part in parts if isinstance(part, RawTensor)]
        if (
            not fits
            or self.is_uniform
            or not self.multiplies
            or len(raw) < len(parts)
            or (self.embeds and not self.keeps_wide)
        ):
            return [], 1
        if all(part.kind == "Q8_0" for part in raw):
            # Its halves take as much as a bf16 copy once the nibbles are kept as well.
            return ([affine8(part.data) for part in raw], 2) if self.keeps_wide else ([], 2)
        found = [affine for part in raw if (affine := affine4(part.data, part.kind)) is not None]
        return (found, 1) if len(found) == len(parts) else ([], 1)

    def _keep_rows(self, rows: Tensor) -> None:
        if self._has_rows:
            self._rows.copy_(rows)
        else:
            self._rows, self._has_rows = rows, True

    def _multiply_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._rows, bias)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        few = self._few
        if few is not None and x.shape[0] <= few.max_rows:
            return few.multiply(x, bias)
        return self._many(x, bias)

    def fused_gated(self, is_gelu: bool) -> FusedCall | None:
        """None: on a CPU a second call costs little."""
        return None

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """ids [num_tokens] -> [num_tokens, in_features]."""
        return F.embedding(ids, self._rows)


def _multiply_unpacked(int4: Int4Weight, dtype: torch.dtype, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product for many rows where no wide copy is kept: the weight is unpacked for this call."""
    return F.linear(x.to(dtype), int4.unpack(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)
