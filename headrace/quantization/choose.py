# SPDX-License-Identifier: Apache-2.0
"""Which `QuantMethod` a layer gets: by the checkpoint's own words, the device and the model's dtype."""

import torch

from headrace.config.model import ModelConfig
from headrace.errors import ConfigError, ModelLoadError
from headrace.quantization.base import QuantMethod
from headrace.quantization.fixed_rows import FixedRows
from headrace.quantization.int4_cpu import CpuMethod, has_fast_bf16
from headrace.quantization.none import FixedTileMethod, PlainMethod

# A 4-bit model keeps a bf16 copy of itself for prefill only where that takes less than this share of the free memory.
COPY_SHARE = 0.4


def copy_bytes(cfg: ModelConfig, free_memory: int) -> int:
    """What the bf16 copy of a 4-bit model takes on a CPU; 0 where it would take too much to be kept."""
    needed = 2 * cfg.num_params()
    return needed if needed < COPY_SHARE * free_memory else 0


def require_room(cfg: ModelConfig, free_memory: int) -> None:
    """ConfigError where the free memory of a CPU, in bytes, does not hold packed weights unpacked; 0: not known."""
    needed = 2 * cfg.num_params()
    if free_memory and needed > free_memory:
        raise ConfigError(
            f"deterministic = true keeps packed weights in bf16, {needed / 2**30:.1f} GiB here, and "
            f"{free_memory / 2**30:.1f} GiB of memory are free: leave it out, free memory, or take a smaller model.",
            param="deterministic",
        )


def make_quant_method(
    prefix: str,
    cfg: ModelConfig,
    dtype: torch.dtype,
    device_type: str,
    source_kind: str,
    free_memory: int | None = None,
    deterministic: bool = False,
) -> QuantMethod:
    """The method of the linear or embedding named `prefix`.

    source_kind: "hf" or "gguf". free_memory: bytes, measured once before the model is built; None: plenty.
    deterministic: a row's product does not depend on the rows beside it; the choice follows from the rest alone, never
    from the free memory. Raises ModelLoadError for a checkpoint quantized in a way that is not built.
    """
    if cfg.quantization is not None:
        name = cfg.quantization.get("quant_method", "an unnamed method")
        if name != "gguf":
            raise ModelLoadError(f"the checkpoint is quantized with {name}, which Headrace cannot run yet.")
    is_packed = source_kind == "gguf"
    embeds = prefix.endswith("embed_tokens")
    multiplies = not embeds or cfg.tie_word_embeddings
    if device_type == "cpu" and dtype == torch.bfloat16 and (is_packed or has_fast_bf16()):
        if deterministic:
            return FixedRows(CpuMethod(embeds, multiplies, is_uniform=True), _uniform, multiplies)
        keeps_wide = free_memory is None or copy_bytes(cfg, free_memory) > 0
        return CpuMethod(embeds, multiplies, keeps_wide=keeps_wide)
    if not deterministic:
        return PlainMethod()
    return FixedRows(PlainMethod(), PlainMethod, multiplies) if device_type == "cpu" else FixedTileMethod()


def _uniform() -> QuantMethod:
    return CpuMethod(is_uniform=True)
