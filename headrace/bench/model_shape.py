# SPDX-License-Identifier: Apache-2.0
"""What a roofline needs to know of the model that is measured."""

from headrace.bench.roofline import Shape
from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.utils.hub import ModelSource, weight_files

KV_DTYPES = {4: "float32", 2: "bfloat16", 1: "fp8"}
FP8_METHODS = {"fp8", "fbgemm_fp8"}


def shape_of(model: ModelConfig, source: ModelSource, dtype: str, kv_bytes_per_token: int | None) -> Shape:
    """
    Args:
        dtype: of activations, as the engine settled it.
        kv_bytes_per_token: of the engine's cache; None: as `dtype`.
    """
    stored = stored_bytes_per_weight(model, source)
    method = str((model.quantization or {}).get("quant_method", "")).lower()
    per_number = None if kv_bytes_per_token is None else kv_bytes_per_token // model.kv_bytes_per_token(1)
    kv_dtype = dtype if per_number is None else KV_DTYPES.get(per_number, dtype)
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
