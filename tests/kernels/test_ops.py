# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every op against its torch reference, on the op's own cases."""

import importlib
import importlib.util
import os
import pkgutil

import pytest
import torch

import headrace.kernels
from headrace.kernels.op import OPS, Case, Op

# The interpreter is numpy: an exponential that becomes infinity on purpose warns there.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"

# The interpreter gets bf16 arithmetic wrong; on a GPU it is tested too.
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())

HAS_TRITON = importlib.util.find_spec("triton") is not None

for module in pkgutil.iter_modules(headrace.kernels.__path__, "headrace.kernels."):
    if not module.name.endswith("_triton") and ".attention_" not in module.name:
        importlib.import_module(module.name)

PAIRS = [(op, name) for op in OPS.values() for name in op.impls]


def run(function: object, case: Case) -> list[torch.Tensor]:
    """The results of one call, and the arguments it may have written."""
    args = [arg.clone() if isinstance(arg, torch.Tensor) and arg._base is None else arg for arg in case.args]
    # A view's base is shared by the case's other views: clone the base and take the same view of it.
    for index, arg in enumerate(case.args):
        if isinstance(arg, torch.Tensor) and arg._base is not None:
            args[index] = arg._base.clone().as_strided(arg.shape, arg.stride(), arg.storage_offset())
    result = function(*args)  # type: ignore[operator]
    results = list(result) if isinstance(result, tuple) else [result]
    return [*results, *(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), PAIRS, ids=[f"{op.name}-{name}" for op, name in PAIRS])
def test_an_implementation_agrees_with_its_reference(op: Op, name: str, dtype: torch.dtype) -> None:
    if name == "triton" and not HAS_TRITON:
        pytest.skip("triton is not installed")
    assert op.cases is not None, f"{op.name} has implementations and no cases"
    device = "cpu" if op.impls[name].supports("cpu") else DEVICE
    implementation = op.implementation(name)
    rtol, atol = op.tolerance(dtype)
    num_cases = 0
    for case in op.cases(dtype, device):
        num_cases += 1
        expected, got = run(op.reference, case), run(implementation, case)
        assert len(expected) == len(got)
        for want, have in zip(expected, got, strict=True):
            assert have.dtype == want.dtype, case.name
            if want.dtype.itemsize == 1:
                # Eight-bit floats are compared by their bits.
                have, want = have.view(torch.uint8), want.view(torch.uint8)
            if not want.is_floating_point():
                assert torch.equal(have, want), case.name
                continue
            torch.testing.assert_close(
                have, want, rtol=rtol, atol=atol, msg=lambda text, case=case: f"{case.name}: {text}"
            )
    assert num_cases or dtype != torch.float32


def test_the_reference_is_chosen_where_no_implementation_runs() -> None:
    op = OPS["copy_blocks"]
    assert op.choose("cpu") is op.reference


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_triton_is_chosen_on_a_gpu() -> None:
    op = OPS["rms_norm"]
    assert op.choose("cuda") is op.implementation("triton")


def test_a_negative_slot_leaves_the_cache_alone() -> None:
    """A padding token must not land in the last block, where a negative index would put it."""
    op = OPS["qk_norm_rope_cache_write"]
    cache = torch.zeros(4, 2, 1, 16, 64)
    for num_tokens in (1, 9):
        slots = torch.full((num_tokens,), -1)
        args = (torch.randn(num_tokens, 4 * 64), None, None, 1e-6, None, torch.zeros(num_tokens, dtype=torch.long))
        op(*args, cache, slots, 2, 1, 64)
        assert not cache.any()
