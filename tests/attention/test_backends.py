# SPDX-License-Identifier: Apache-2.0
"""Every backend against attention written plainly, on one table of cases."""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, DTYPE_NAMES, TOLERANCE, AttentionCase, build_step, dense_attention, quantize_step

from headrace.attention.base import AttentionBackend
from headrace.attention.choose import BACKENDS
from headrace.attention.reference import VanillaAttention
from headrace.kernels.op import bind

# The interpreter is numpy: an exponential that becomes infinity on purpose warns there.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"

# The interpreter gets bf16 arithmetic wrong; the CPU's cache is fp32 or bf16.
DTYPES = {"TRITON": (torch.float32, torch.float16), "VANILLA": (torch.float32, torch.bfloat16)}
PAIRS = [
    (name, dtype)
    for name, dtypes in DTYPES.items()
    for dtype in (dtypes if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16))
]


# VANILLA multiplies what it hides by 0, so the worker clears a block when a row takes it; kernels never read it.
FILL = {"TRITON": float("nan"), "VANILLA": 1e4}


def make(name: str, case: AttentionCase, dtype: torch.dtype, kv_dtype: str | None = None) -> AttentionBackend:
    """A backend bound to a case; Triton's runs in the interpreter where there is no GPU."""
    if name == "TRITON" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    backend: AttentionBackend = bind(BACKENDS[name][1])(case.need(DTYPE_NAMES[dtype], kv_dtype))
    return backend


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_a_backend_agrees_with_dense_attention(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    step = build_step(case, dtype, DEVICE, FILL[name])
    backend = make(name, case, dtype)
    expected = dense_attention(case, case.need(DTYPE_NAMES[dtype]), step)
    got = backend.forward(step.q, step.kv_cache, step.metadata, 0)
    assert got.shape == (step.metadata.num_tokens, case.num_q_heads * case.head_dim)
    assert got.dtype == dtype
    torch.testing.assert_close(got[: len(expected)].double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


# The interpreter cannot multiply the bf16 values that int8 becomes beside 16-bit queries.
QUANTIZED = [
    (name, dtype, kv_dtype)
    for name, dtype in PAIRS
    for kv_dtype in ("fp8", "int8")
    if DEVICE == "cuda" or name == "VANILLA" or (dtype, kv_dtype) != (torch.float16, "int8")
]
# Bytes of slots that no token owns: of NaN in e4m3 and in bf16, and of large numbers in both.
FILL_BYTE = {"TRITON": 0x7F, "VANILLA": 0x3E}
# With fp16 queries over fp8 and bf16 values of int8 what is multiplied is rounded as bf16 is.
QUANTIZED_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: TOLERANCE[torch.bfloat16]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), QUANTIZED, ids=str)
def test_a_backend_reads_a_cache_of_8_bits(name: str, case: AttentionCase, dtype: torch.dtype, kv_dtype: str) -> None:
    step = build_step(case, dtype, DEVICE)
    quantize_step(case, step, kv_dtype, FILL_BYTE[name])
    backend = make(name, case, dtype, kv_dtype)
    expected = dense_attention(case, case.need(DTYPE_NAMES[dtype], kv_dtype), step)
    got = backend.forward(step.q, step.kv_cache, step.metadata, 0, step.kv_scale)
    assert got.dtype == dtype
    torch.testing.assert_close(got[: len(expected)].double().cpu(), expected, rtol=0, atol=QUANTIZED_TOLERANCE[dtype])


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_of_a_step_share_its_plan(name: str) -> None:
    """The second layer's result is as right as the first's, out of the same metadata."""
    case = next(case for case in CASES if case.name == "mixed")
    step = build_step(case, torch.float32, DEVICE, FILL[name])
    other = build_step(case, torch.float32, DEVICE, FILL[name])
    first, second = make(name, case, torch.float32), make(name, case, torch.float32)
    one = first.forward(step.q, step.kv_cache, step.metadata, 0)
    num_plans = len(step.metadata.plans)
    two = second.forward(step.q, other.kv_cache, step.metadata, 0)
    assert len(step.metadata.plans) == num_plans
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 50])
def test_a_bf16_model_over_an_fp32_cache_stays_close(window: int | None) -> None:
    """The CPU's default: decode in fp32, long chunks in bf16 where the processor has it, a bf16 result."""
    rows = ((100, 1), (7, 1), (30, 1), (64, 90), (0, 70), (3, 20))
    case = AttentionCase("default", rows, 9, 3, 64, tokens_per_block=32, window=window)
    step = build_step(case, torch.float32, "cpu", FILL["VANILLA"])
    need = replace(case.need("bfloat16"), kv_dtype="float32")
    got = VanillaAttention(need).forward(step.q, step.kv_cache, step.metadata, 0)
    assert got.dtype == torch.bfloat16
    expected = dense_attention(case, need, step)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])
