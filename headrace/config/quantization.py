# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's quantization_config says, whoever wrote it."""

from collections.abc import Mapping
from typing import Any


def read_quantization(found: Any) -> dict[str, Any]:
    """`ModelConfig.quantization` and `kv_dtype`. A config that quantizes nothing but the KV cache leaves the first out:
    its weights are plain."""
    if not isinstance(found, Mapping):
        return {"quantization": found, "kv_dtype": None}
    kv_dtype = _kv_dtype(found)
    return {"quantization": None if kv_dtype and _weights_are_plain(found) else found, "kv_dtype": kv_dtype}


def _kv_dtype(found: Mapping[str, Any]) -> str | None:
    """ModelOpt's kv_cache_quant_algo (FP8, INT8, NVFP4), or the kv_cache_scheme of it and compressed-tensors."""
    algorithm = found.get("kv_cache_quant_algo")
    if algorithm and str(algorithm).upper() != "NONE":
        return str(algorithm).lower()
    scheme = found.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    kind, num_bits = str(scheme.get("type", "float")), scheme.get("num_bits", 8)
    return {("float", 8): "fp8", ("int", 8): "int8"}.get((kind, num_bits), f"{kind}{num_bits}")


def _weights_are_plain(found: Mapping[str, Any]) -> bool:
    """Of the two that quantize a KV cache alone: ModelOpt without a quant_algo, compressed-tensors without groups."""
    method = str(found.get("quant_method", ""))
    if method == "modelopt":
        return str(found.get("quant_algo") or "NONE").upper() in ("NONE", "NO_QUANT") and not found.get("config_groups")
    return method == "compressed-tensors" and not found.get("config_groups")
