# SPDX-License-Identifier: Apache-2.0
"""The engine on the real demo model: greedy answers do not depend on how requests meet, and the examples run."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.llm import LLM
from headrace.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
SETTINGS = {"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 256, "kv_cache_config": {"max_tokens": 4096}}


@pytest.fixture(scope="module")
def llm(demo_model: str) -> Iterator[LLM]:
    with LLM(demo_model, dtype="float32", **SETTINGS) as engine:
        yield engine


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    output = llm.generate("The capital of France is", SamplingParams(max_tokens=4, temperature=0.0))
    assert output.outputs[0].text.startswith(" Paris")


def test_alone_together_and_from_the_cache_the_tokens_are_the_same(llm: LLM) -> None:
    prompts = ["The capital of France is", "Water boils at", "def add(a, b):", "One, two, three, " * 25, "你好"]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    alone = [llm.generate(prompt, params).outputs[0].token_ids for prompt in prompts]
    together = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert together[3].num_cached_tokens > 0


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=42)
    alone = llm.generate("Once upon a time", params).outputs[0].token_ids
    crowd = llm.generate(
        ["Once upon a time", *[f"Story {i}:" for i in range(6)]],
        [params, *[SamplingParams(max_tokens=12, temperature=1.0)] * 6],
    )
    assert crowd[0].outputs[0].token_ids == alone
    three = llm.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=1.0, seed=42, n=3)).outputs
    assert three[0].token_ids == alone and len({tuple(choice.token_ids) for choice in three}) == 3


def test_random_aborts_leak_nothing(demo_model: str) -> None:
    async def go() -> None:
        chance = random.Random(1)
        llm = AsyncLLM(model=demo_model, **SETTINGS)
        await llm.start()

        async def one(i: int) -> None:
            stream = llm.generate(
                f"Number {i}: " + "word " * chance.randrange(150), {"max_tokens": chance.randrange(1, 30)}
            )
            give_up = chance.randrange(12)
            async for output in stream:
                give_up -= 1
                if give_up == 0:
                    break
                assert output.request_id
            await stream.aclose()

        await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(60))), 300)
        stats = await llm.get_stats()
        assert stats["num_used_blocks"] == stats["num_running"] == stats["num_waiting"] == 0
        llm.shutdown()

    asyncio.run(go())


def test_the_offline_example_runs(demo_model: str) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/offline.py"), demo_model],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and len(done.stdout.splitlines()) >= 4


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def test_the_chat_client_example_talks_to_a_server(demo_model: str) -> None:
    pytest.importorskip("openai")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    serve = ["serve", demo_model, "--port", str(port), "--max_seq_len", "512"]
    server = subprocess.Popen([sys.executable, "-m", "headrace", *serve], env=environment)
    try:
        end = time.monotonic() + 120
        while not is_healthy(port):
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/chat_client.py"), f"http://127.0.0.1:{port}/v1", "What is 2+2?"],
            capture_output=True, text=True, timeout=120, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "output tokens]" in done.stdout and len(done.stdout) > 30
    finally:
        server.terminate()
        server.wait(20)
