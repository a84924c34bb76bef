# SPDX-License-Identifier: Apache-2.0
"""Every backend against attention written plainly, on one table of cases."""

import importlib.util
import os

import pytest
import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.choose import BACKENDS
from headrace.kernels.op import bind
from attention_cases import CASES, DTYPE_NAMES, TOLERANCE, AttentionCase, build_step, dense_attention

# The interpreter is numpy: an exponential that becomes infinity on purpose warns there.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())


# VANILLA multiplies what it hides by 0, so the worker clears a block when a row takes it; kernels never read it.
FILL = {"TRITON": float("nan"), "VANILLA": 1e4}


def make(name: str, case: AttentionCase, dtype: torch.dtype) -> AttentionBackend:
    """A backend bound to a case; Triton's runs in the interpreter where there is no GPU."""
    if name == "TRITON" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    backend: AttentionBackend = bind(BACKENDS[name][1])(case.need(DTYPE_NAMES[dtype]))
    return backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_agrees_with_dense_attention(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    if name == "VANILLA" and DEVICE == "cpu" and dtype == torch.float16:
        pytest.skip("the CPU's cache is fp32 or bf16")
    step = build_step(case, dtype, DEVICE, FILL[name])
    backend = make(name, case, dtype)
    expected = dense_attention(case, case.need(DTYPE_NAMES[dtype]), step)
    got = backend.forward(step.q, step.kv_cache, step.metadata, 0)
    assert got.shape == (step.metadata.num_tokens, case.num_q_heads * case.head_dim)
    assert got.dtype == dtype
    torch.testing.assert_close(got[: len(expected)].double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


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
