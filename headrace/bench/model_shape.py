# SPDX-License-Identifier: Apache-2.0
"""What a roofline needs to know of the model that is measured."""

from headrace.bench.roofline import Shape
from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.utils.hub import ModelSource, weight_files

KV_DTYPES = ("float32", "bfloat16", "fp8", "int8")
FP8_METHODS = {"fp8", "fbgemm_fp8"}


def shape_of(model: ModelConfig, source: ModelSource, dtype: str, kv_bytes_per_token: int | None) -> Shape:
    """
    Args:
        dtype: of activations, as the engine settled it.
        kv_bytes_per_token: of the engine's cache; None: as `dtype`.
    """
    stored = stored_bytes_per_weight(model, source)
    method = str((model.quantization or {}).get("quant_method", "")).lower()
    kv_dtype = {model.kv_bytes_per_token(name): name for name in KV_DTYPES}.get(kv_bytes_per_token or 0, dtype)
    return Shape.of(model, dtype, kv_dtype, stored, "fp8" if method in FP8_METHODS else None)


def stored_bytes_per_weight(model: ModelConfig, source: ModelSource) -> float | None:
    """Bytes that a packed checkpoint takes for a weight, on average; None where weights are plain numbers."""
    if model.quantization is None:
        return None
    try:
        files = [source.path] if source.kind == "gguf" else weight_files(source.path)
    except ModelLoadError:
        # Random weights need no files.
        return None
    total = sum(file.stat().st_size for file in files if file.is_file())
    return total / model.num_params() if total else None
