# SPDX-License-Identifier: Apache-2.0
"""`deterministic: true` on a GPU: the same bits whatever runs beside a request, in graphs and without, and in products
and attention by themselves."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import GEMMA, LLAMA, QWEN2, QWEN3, Bench, alone, requests, run, started

from headrace.kernels.fixed_tile import fixed_tile_linear
from headrace.kernels.logprobs import gather_logprobs

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU"),
]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-bf16": (LLAMA, {}),
    "llama-fp16": (LLAMA, {"dtype": "float16"}),
    "llama-fp32": (LLAMA, {"dtype": "float32"}),
    "qwen2-fp8-cache": (QWEN2, {"kv": "fp8"}),
    "qwen3-int8-cache": (QWEN3, {"kv": "int8"}),
    "gemma3-bf16": (GEMMA, {}),
}


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model, settings = CASES[request.param]
    made = started(model, tmp_path_factory.mktemp("tiny"), "cuda", **settings)
    while made.worker.use_idle_time():
        pass
    yield made
    made.worker.shutdown()


def test_neither_batch_nor_chunks_nor_hits_nor_arrivals_show(bench: Bench) -> None:
    wanted = requests(bench)
    expected = alone(bench, wanted)
    for tokens, depth in ((1024, 1), (50, 2), (7, 2)):
        scheduler = bench.scheduler(max_prefill_tokens=tokens)
        assert run(bench, scheduler, wanted, depth) == expected
        assert run(bench, scheduler, wanted, depth) == expected
    for seed in range(5):
        assert run(bench, bench.scheduler(max_prefill_tokens=20 + 90 * seed), wanted, 2, seed) == expected


def test_graphs_do_not_show(tmp_path: Path) -> None:
    found = []
    for graphs in ({}, {"cuda_graph_config": None}):
        bench = started(QWEN3, tmp_path, "cuda", **graphs)
        while bench.worker.use_idle_time():
            pass
        found.append(run(bench, bench.scheduler(), requests(bench), 2))
        bench.worker.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 4096), (12288, 4096), (2880, 5120), (4096, 151_936)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_a_product_of_any_size(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator, device="cuda", dtype=dtype) * 0.02
    x = torch.randn(3000, in_features, generator=generator, device="cuda", dtype=dtype)
    bias = torch.randn(out_features, generator=generator, device="cuda", dtype=dtype)
    multiply = fixed_tile_linear.choose("cuda", True)
    whole = multiply(x, weight, bias)
    wanted = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(whole, wanted, rtol=2e-2, atol=2e-2)
    for begin, end in ((0, 1), (1, 2), (700, 717), (100, 163), (100, 165), (5, 517), (2999, 3000)):
        assert torch.equal(multiply(x[begin:end], weight, bias), whole[begin:end])


def test_a_normaliser_has_the_same_bits_alone() -> None:
    logits = 5 * torch.randn(300, 151_936, device="cuda")
    chosen = torch.arange(300, device="cuda")
    gather = gather_logprobs.choose("cuda", True)
    whole = gather(logits, chosen, 5)
    for row in (0, 7, 299):
        one = gather(logits[row : row + 1], chosen[row : row + 1], 5)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(one, whole, strict=True))
