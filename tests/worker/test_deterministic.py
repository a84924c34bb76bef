# SPDX-License-Identifier: Apache-2.0
"""`deterministic: true`: a request's tokens and log-probabilities, to the last bit, whatever runs beside it."""

from collections.abc import Iterator
from typing import Any

import pytest
from alike import GEMMA, LLAMA, QWEN2, QWEN3, Bench, alone, requests, run, started

from headrace.core.kv_cache_spec import CacheLayout

CASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any]]] = {
    "llama-bf16": (LLAMA, {}),
    "llama-fp32": (LLAMA, {"dtype": "float32"}),
    "llama-fp16": (LLAMA, {"dtype": "float16"}),
    "llama-one-thread": (LLAMA, {"num_threads": 1}),
    "llama-int8-cache": (LLAMA, {"kv": "int8"}),
    "qwen2-bf16": (QWEN2, {"kv": "bfloat16"}),
    "qwen2-fp32": (QWEN2, {"dtype": "float32", "kv": "fp8"}),
    "qwen3-bf16": (QWEN3, {}),
    "gemma3-bf16": (GEMMA, {}),
    "gemma3-fp32": (GEMMA, {"dtype": "float32"}),
    "packed-4-bits": ("Q4_1", {}),
    "packed-8-bits": ("Q8_0", {}),
}


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model, settings = CASES[request.param]
    made = started(model, tmp_path_factory.mktemp("tiny"), **settings)
    yield made
    made.worker.shutdown()


def test_neither_batch_nor_chunks_nor_hits_show(bench: Bench) -> None:
    wanted = requests(bench)
    expected = alone(bench, wanted)
    for tokens, depth in ((50, 1), (7, 2)):
        scheduler = bench.scheduler(max_prefill_tokens=tokens)
        # The second time all is found in the prefix cache, whole blocks and parts of them.
        assert run(bench, scheduler, wanted, depth) == expected
        again = run(bench, scheduler, wanted, depth)
        assert again == expected
        cached = [outcome.num_cached for outcome in again.values()]
        assert sum(cached) > 300 and any(count % 16 for count in cached)


def test_neither_arrivals_nor_preemptions_show(bench: Bench) -> None:
    wanted = requests(bench)
    expected = alone(bench, wanted)
    for seed in range(2):
        assert run(bench, bench.scheduler(max_prefill_tokens=20 + 200 * seed), wanted, 2, seed) == expected
    if len(bench.layout.groups) > 1:
        return
    layout = CacheLayout.plain(bench.config.max_seq_len // 16 + 4)
    scheduler = bench.scheduler(layout=layout, max_prefill_tokens=64, watermark=0.0)
    names = ("few", "some", "more", "partial", "drawn", "edited")
    long = {name: (wanted[name][0][-60:], wanted[name][1] | {"max_tokens": 120}) for name in names}
    expected = alone(bench, long)
    assert run(bench, scheduler, long, 2) == expected
    assert scheduler.counters.num_preemptions > 0
