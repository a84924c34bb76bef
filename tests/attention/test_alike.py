# SPDX-License-Identifier: Apache-2.0
"""The backends of `deterministic`: right, and with the same bits for a token alone, in a batch and in any chunk."""

import importlib.util
import itertools
import os
from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, DTYPE_NAMES, TOLERANCE, AttentionCase, Step, build_step, dense_attention
from torch import Tensor

from headrace.attention.alike import UNIT
from headrace.attention.base import AttentionBackend, AttentionMetadata
from headrace.attention.choose import ALIKE_BACKENDS, BackendChooser, refusals
from headrace.errors import ConfigError
from headrace.kernels.op import bind

# The interpreter is numpy: an exponential that becomes infinity on purpose warns there.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
# VANILLA multiplies what it hides by 0; Triton's kernels never read it.
FILL = {"TRITON": float("nan"), "VANILLA": 1e4}
LONG = AttentionCase("several_units", ((UNIT + 40, 1), (0, 700), (UNIT - 3, 6)), head_dim=32)
LONG_WINDOW = replace(LONG, name="a_window_over_units", window=UNIT - 20)


def make(name: str, case: AttentionCase, dtype: torch.dtype) -> AttentionBackend:
    if name == "TRITON" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    need = case.need(DTYPE_NAMES[dtype])
    if name == "VANILLA" and refusals(name, need, "cpu", deterministic=True):
        pytest.skip("it refuses this need")
    backend: AttentionBackend = bind(ALIKE_BACKENDS[name][1])(need)
    return backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALIKE_BACKENDS)
@pytest.mark.parametrize("case", (*CASES, LONG, LONG_WINDOW), ids=lambda case: case.name)
def test_a_backend_agrees_with_dense_attention(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    if name == "TRITON" and (case in (LONG, LONG_WINDOW)) and DEVICE == "cpu":
        pytest.skip("long in the interpreter, and nothing new to it")
    device = "cpu" if name == "VANILLA" else DEVICE
    step = build_step(case, dtype, device, FILL[name])
    expected = dense_attention(case, case.need(DTYPE_NAMES[dtype]), step)
    got = make(name, case, dtype).forward(step.q, step.kv_cache, step.metadata, 0)
    torch.testing.assert_close(got[: len(expected)].double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


def part(step: Step, row: int, cached: int, begin: int, end: int) -> tuple[Tensor, AttentionMetadata]:
    """Queries begin to end of a row's new tokens, as a step of their own."""
    whole = step.metadata
    start = int(whole.query_start_loc[row])
    device = step.q.device
    count = end - begin
    metadata = replace(
        whole,
        num_tokens=count,
        num_rows=1,
        num_decode_rows=int(count == 1),
        first_prefill_row=int(count == 1),
        max_query_len=count,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([cached + end], dtype=torch.int32, device=device),
        block_tables=(whole.block_tables[0][row : row + 1],),
        plans={},
    )
    return step.q[start + begin : start + end], metadata


@pytest.mark.parametrize("name", ALIKE_BACKENDS)
@pytest.mark.parametrize("case", (*CASES, LONG, LONG_WINDOW), ids=lambda case: case.name)
def test_a_token_has_the_same_bits_in_every_step(name: str, case: AttentionCase) -> None:
    if name == "TRITON" and (case in (LONG, LONG_WINDOW)) and DEVICE == "cpu":
        pytest.skip("long in the interpreter, and nothing new to it")
    device = "cpu" if name == "VANILLA" else DEVICE
    step = build_step(case, torch.float32, device, FILL[name])
    backend = make(name, case, torch.float32)
    whole = backend.forward(step.q, step.kv_cache, step.metadata, 0)
    starts = step.metadata.query_start_loc.tolist()
    for row, (cached, new) in enumerate(case.rows):
        cuts = {0, new // 3, new // 2, min(new, new // 2 + 1), max(new - 1, 0), new}
        ends = sorted(cuts)
        for begin, end in itertools.pairwise(ends):
            q, metadata = part(step, row, cached, begin, end)
            alone = backend.forward(q, step.kv_cache, metadata, 0)
            assert torch.equal(alone, whole[starts[row] + begin : starts[row] + end]), (row, begin, end)


def test_vanilla_is_refused_on_a_gpu_and_for_a_softcap() -> None:
    need = AttentionCase("any", ()).need("bfloat16")
    for chooser, wish in (
        (BackendChooser("cuda", "VANILLA", deterministic=True), need),
        (BackendChooser("cpu", "AUTO", deterministic=True), replace(need, softcap=2.0)),
    ):
        with pytest.raises(ConfigError, match="with deterministic = true"):
            chooser(wish)
    chooser = BackendChooser("cuda", "AUTO", (9, 0), deterministic=True)
    assert chooser.long_needs(torch.device("cuda")) == []
