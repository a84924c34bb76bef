# SPDX-License-Identifier: Apache-2.0
"""Which `QuantMethod` a layer gets: by the checkpoint's own words, the device and the model's dtype."""

import torch

from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.quantization.base import QuantMethod
from headrace.quantization.int4_cpu import CpuMethod, has_fast_bf16
from headrace.quantization.none import PlainMethod

# A 4-bit model keeps a bf16 copy of itself for prefill only where that takes less than this share of the free memory.
COPY_SHARE = 0.4


def copy_bytes(cfg: ModelConfig, free_memory: int) -> int:
    """What the bf16 copy of a 4-bit model takes on a CPU; 0 where it would take too much to be kept."""
    needed = 2 * cfg.num_params()
    return needed if needed < COPY_SHARE * free_memory else 0


def make_quant_method(
    prefix: str,
    cfg: ModelConfig,
    dtype: torch.dtype,
    device_type: str,
    source_kind: str,
    free_memory: int | None = None,
) -> QuantMethod:
    """The method of the linear or embedding named `prefix`.

    source_kind: "hf" or "gguf". free_memory: bytes, measured once before the model is built; None: plenty.
    Raises ModelLoadError for a checkpoint quantized in a way that is not built.
    """
    if cfg.quantization is not None:
        name = cfg.quantization.get("quant_method", "an unnamed method")
        if name != "gguf":
            raise ModelLoadError(f"the checkpoint is quantized with {name}, which Headrace cannot run yet.")
    is_packed = source_kind == "gguf"
    if device_type == "cpu" and dtype == torch.bfloat16 and (is_packed or has_fast_bf16()):
        embeds = prefix.endswith("embed_tokens")
        keeps_wide = free_memory is None or copy_bytes(cfg, free_memory) > 0
        return CpuMethod(embeds, multiplies=not embeds or cfg.tie_word_embeddings, keeps_wide=keeps_wide)
    return PlainMethod()
