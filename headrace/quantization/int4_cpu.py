# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU: 4-bit weights for few rows, bf16 weights in oneDNN's layout for many.

Measured on 2 cores of a Zen 4 and of a Sapphire Rapids, SmolLM2's shapes: up to 4 rows torch's packed int4 product is
1.3 to 3 times as fast as bf16; from 8 rows on it falls behind (it unpacks the weight anew for every 4 rows), 5 times at
64. oneDNN's own weight layout saves bf16 a reorder at each call: 1.3 to 3 times as fast up to 16 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.quantization.base import RawTensor, copy_weight
from headrace.quantization.gguf import GROUP, Affine4, affine4

FEW_ROWS = 4
# oneDNN picks a layout for about this many rows; one made for a single row costs up to 1.5 times at 8 and more.
LAYOUT_ROWS = 8
# The int4 product takes outputs in blocks of 16.
OUTPUT_BLOCK = 16


def has_fast_bf16() -> bool:
    """Whether the CPU multiplies in bf16; elsewhere oneDNN imitates it, and fp32 is 2 to 4 times as fast."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_int4() -> bool:
    """Whether torch's packed int4 product is vectorised here."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")


class WideWeight:
    """A dense weight [out, in]: bf16 in oneDNN's layout, or plain fp32 where the CPU has no bf16 units."""

    def __init__(self, is_bf16: bool) -> None:
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        self._weight: Tensor | None = None

    def store(self, weight: Tensor) -> None:
        """Take a weight of `self.dtype`; a second time into the same memory."""
        packed = weight
        if self.dtype == torch.bfloat16:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        if self._weight is None:
            self._weight = packed
        else:
            self._weight.copy_(packed)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in] -> [num_tokens, out], in x's dtype."""
        if self.dtype == torch.bfloat16:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return F.linear(x.float(), self._weight, None if bias is None else bias.float()).to(x.dtype)


class Int4Weight:
    """A 4-bit weight in torch's packed layout; with `keeps_nibbles` it can be unpacked again for many rows."""

    def __init__(self, keeps_nibbles: bool) -> None:
        self.keeps_nibbles = keeps_nibbles
        self._packed: Tensor | None = None
        self._scales_and_zeros: Tensor | None = None
        self._nibbles: Tensor | None = None

    def store(self, parts: list[Affine4]) -> None:
        """Take the fused parts, one below the other; a second time into the same memory."""
        q = torch.cat([part.q for part in parts])
        scale = torch.cat([part.scale for part in parts])
        offset = torch.cat([part.offset for part in parts])
        # torch computes (q - 8) * scale + zero, zero in bf16: near 0 in this form, where bf16 is finest.
        zeros = offset + 8.0 * scale
        self._keep(
            torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1),
            torch.stack([scale.t(), zeros.t()], dim=-1).to(torch.bfloat16).contiguous(),
            q[:, ::2] | (q[:, 1::2] << 4) if self.keeps_nibbles else None,
        )

    def _keep(self, packed: Tensor, scales_and_zeros: Tensor, nibbles: Tensor | None) -> None:
        if self._packed is None:
            self._packed, self._scales_and_zeros, self._nibbles = packed, scales_and_zeros, nibbles
            return
        self._packed.copy_(packed)
        self._scales_and_zeros.copy_(scales_and_zeros)
        if nibbles is not None:
            self._nibbles.copy_(nibbles)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: bf16 [num_tokens, in] -> [num_tokens, out]. Reads the weight once for every 4 rows."""
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


class CpuMethod:
    """The QuantMethod of bf16 models on a CPU, whatever type the checkpoint's tensors have.

    embeds: rows are looked up (an embedding); multiplies: the product is used (all but an untied embedding).
    keeps_wide: 4-bit layers keep a bf16 copy for many rows; without it they are unpacked at each such call.
    """

    def __init__(
        self, embeds: bool = False, multiplies: bool = True, keeps_wide: bool = True, is_bf16: bool | None = None
    ) -> None:
        self.embeds = embeds
        self.multiplies = multiplies
        self.keeps_wide = keeps_wide
        self._wide = WideWeight(has_fast_bf16() if is_bf16 is None else is_bf16)
        self._parts: dict[int, Tensor | RawTensor] = {}
        self._int4: Int4Weight | None = None
        self._rows: Tensor | None = None

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
        is_int4 = self._finish_int4(parts) if self.multiplies and not self.embeds else False
        if is_int4 and not self.keeps_wide:
            return
        # Without room for a second copy, an embedding multiplies by its own rows.
        packs = self.multiplies and (self.keeps_wide or not self.embeds)
        dense = torch.empty(sum(self.out_features), self.in_features, dtype=self._wide.dtype if packs else self.dtype)
        start = 0
        for part, rows in zip(parts, self.out_features, strict=True):
            copy_weight(dense[start : start + rows], part)
            start += rows
        if packs:
            self._wide.store(dense)
        if self.embeds:
            self._keep_rows(dense.to(self.dtype))
        self._many = self._wide.multiply if packs else self._multiply_rows

    def _finish_int4(self, parts: list[Tensor | RawTensor]) -> bool:
        """Store 4-bit parts as such; False where a part is of another type or the shape does not suit."""
        if not has_int4() or sum(self.out_features) % OUTPUT_BLOCK or self.in_features % GROUP:
            return False
        raw = [part for part in parts if isinstance(part, RawTensor)]
        unpacked = [affine for part in raw if (affine := affine4(part.data, part.kind)) is not None]
        if len(unpacked) < len(parts):
            return False
        if self._int4 is None:
            self._int4 = Int4Weight(keeps_nibbles=not self.keeps_wide)
        self._int4.store(unpacked)
        self._many = self._wide.multiply if self.keeps_wide else self._multiply_unpacked
        return True

    def _keep_rows(self, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.copy_(rows)

    def _multiply_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._rows, bias)

    def _multiply_unpacked(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self._int4.unpack(self._wide.dtype)
        wide_bias = None if bias is None else bias.to(weight.dtype)
        return F.linear(x.to(weight.dtype), weight, wide_bias).to(x.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        if x.shape[0] <= FEW_ROWS and self._int4 is not None:
            return self._int4.multiply(x, bias)
        return self._many(x, bias)

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """ids [num_tokens] -> [num_tokens, in_features]."""
        return F.embedding(ids, self._rows)
