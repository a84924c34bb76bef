# SPDX-License-Identifier: Apache-2.0
"""Names of number formats, without torch."""

from typing import Any

SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8_e4m3": "fp8",
    "e4m3": "fp8",
    "float8_e4m3fn": "fp8",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
INT8_SCALE_BYTES = 2


def kv_head_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes of one token's key, or value, of one head in a KV cache: int8 has a scale for each."""
    return head_dim * BYTES[kv_dtype] + (INT8_SCALE_BYTES if kv_dtype == "int8" else 0)


def plain_dtype(value: Any) -> Any:
    """One spelling for each format: `torch.bfloat16` and `bf16` become `bfloat16`; anything else is left alone."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.").lower()
    return SPELLINGS.get(name, name)
