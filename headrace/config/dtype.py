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
    "float8_e4m3fn": "fp8",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def plain_dtype(value: Any) -> Any:
    """One spelling for each format: `torch.bfloat16` and `bf16` become `bfloat16`; anything else is left alone."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.").lower()
    return SPELLINGS.get(name, name)
