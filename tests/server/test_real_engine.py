# SPDX-License-Identifier: Apache-2.0
"""`headrace serve` as a process of its own, with the demo model, under the `openai` client and under violence."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from openai import APIError, AsyncOpenAI, OpenAI
from running_server import wait_for

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
START_SECONDS = 120


class ServeProcess:
    """`headrace serve`, its log, and what it leaves behind."""

    def __init__(self, model: str, *flags: str) -> None:
        # Sockets lie in TMPDIR, and the path of one may have 107 bytes.
        self.folder = tempfile.TemporaryDirectory(prefix="hr")
        self.log_file = Path(self.folder.name) / "log"
        self.temp = Path(self.folder.name) / "t"
        self.temp.mkdir()
        self.shared_before = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "headrace", "serve", model, "--served_model_name", "demo", *flags]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env={**os.environ, "TMPDIR": str(self.temp)}, start_new_session=True
            )
        self.started = time.monotonic()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.log)
        return found.group() if found else ""

    def wait_ready(self) -> "ServeProcess":
        wait_for(lambda: bool(self.url) or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.log
        self.core = httpx.get(f"{self.url}/server_info").json()["engine"]["core_pid"]
        return self

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def stats(self) -> dict:
        return httpx.get(f"{self.url}/server_info", timeout=30).json()["stats"]

    def is_idle(self) -> bool:
        stats = self.stats()
        return stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0

    def check_gone(self, code: int, seconds: float) -> None:
        """It ends by itself with the code, and leaves no process, no shared memory, no file."""
        assert self.process.wait(seconds) == code, self.log
        wait_for(lambda: not os.path.exists(f"/proc/{self.core}"), 2.0)
        mine = {name for name in set(os.listdir("/dev/shm")) - self.shared_before if "headrace" in name}
        assert not mine
        assert list(self.temp.iterdir()) == []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.folder.cleanup()


@pytest.fixture
def start(demo_model: str) -> Iterator:
    started: list[ServeProcess] = []

    def start_one(*flags: str) -> ServeProcess:
        started.append(ServeProcess(demo_model, "--port", "0", *flags))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def demo(demo_model: str) -> Iterator[ServeProcess]:
    process = ServeProcess(demo_model, "--port", "0", "--access_log")
    yield process.wait_ready()
    process.close()


def test_streamed_and_whole_answers_are_equal(demo):
    with demo.openai() as client:
        for settings in ({"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0, "stop": ["Paris"]}):
            whole = client.chat.completions.create(model="demo", messages=ASK, max_tokens=24, **settings)
            stream = client.chat.completions.create(
                model="demo",
                messages=ASK,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
                **settings,
            )
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == whole.choices[0].message.content
            assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
            assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
            assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_answer_is_right_and_its_logprobs_spell_it(demo):
    with demo.openai() as client:
        answer = client.chat.completions.create(
            model="demo", messages=ASK, temperature=0, logprobs=True, top_logprobs=2, max_tokens=40
        )
    choice = answer.choices[0]
    assert "Paris" in choice.message.content and choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert bytes(b for e in choice.logprobs.content for b in e.bytes or []).decode() == choice.message.content
    assert all(len(e.top_logprobs) == 2 and e.logprob <= e.top_logprobs[0].logprob for e in choice.logprobs.content)


def test_tokenize_is_what_the_answer_starts_from(demo):
    chat = httpx.post(f"{demo.url}/tokenize", json={"messages": ASK}, timeout=30).json()
    with demo.openai() as client:
        usage = client.chat.completions.create(model="demo", messages=ASK, max_tokens=1).usage
    assert usage.prompt_tokens == chat["count"] == len(chat["tokens"])
    text = "Grüße 世界 👩‍👩‍👧 \n\n def f(): pass"
    ids = httpx.post(f"{demo.url}/tokenize", json={"prompt": text}, timeout=30).json()["tokens"]
    assert httpx.post(f"{demo.url}/detokenize", json={"tokens": ids}, timeout=30).json()["prompt"] == text


def test_a_batch_comes_back_in_order_with_its_cache_hits(demo):
    prompts = ["One, two,", "The sky is blue. " * 20, "Three, four,"]
    with demo.openai() as client:
        first = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0, echo=True)
        again = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0, echo=True)
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert all(c.text.startswith(p) for c, p in zip(first.choices + again.choices, prompts * 2, strict=True))
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < again.usage.prompt_tokens and cached % 32 == 0


def test_a_chat_says_how_much_of_it_was_cached_whole_and_streamed(demo):
    messages = [{"role": "user", "content": "Say yes. " * 40}]
    keep = {"kv_cache_retention_config": {"token_range_retention_configs": [{"token_start": 0, "priority": 100}]}}
    with demo.openai() as client:
        ask = partial(client.chat.completions.create, model="demo", messages=messages, max_tokens=2, extra_body=keep)
        first, again = ask().usage, ask().usage
        streamed = list(ask(stream=True, stream_options={"include_usage": True}))[-1].usage
    assert first.prompt_tokens_details.cached_tokens < 32 <= again.prompt_tokens_details.cached_tokens
    assert streamed == again


def test_bad_requests_are_4xx_and_the_server_goes_on(demo):
    bad = [
        ({"prompt": "hello " * 9000}, "prompt", "context_length_exceeded"),
        ({"prompt": [49152]}, "prompt", "invalid_request"),
        ({"prompt": [-1]}, "prompt", "invalid_request"),
        ({"prompt": ""}, "prompt", "invalid_request"),
        ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias", "invalid_request"),
        ({"prompt": "a", "stop_token_ids": [2**40]}, "stop_token_ids", "invalid_request"),
        ({"prompt": "a", "max_tokens": 8192}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 2**62}, "max_tokens", None),
        ({"prompt": "a", "stop": ["x"] * 10_000}, "stop", "invalid_request"),
    ]
    for fields, param, code in bad:
        for stream in (False, True):
            response = httpx.post(
                f"{demo.url}/v1/completions", json={"model": "demo", "stream": stream, **fields}, timeout=30
            )
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert code in (None, error["code"])
    with demo.openai() as client:
        assert client.completions.create(model="demo", prompt=[49151], max_tokens=1).usage.completion_tokens == 1
    wait_for(demo.is_idle)


def test_64_streams_at_once_all_end(demo):
    async def one(client, number):
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"Count from {number}."}], stream=True, max_tokens=8
        )
        chunks = [chunk async for chunk in stream]
        return chunks[-1].choices[0].finish_reason, "".join(c.choices[0].delta.content or "" for c in chunks)

    async def main():
        async with AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    answers = asyncio.run(main())
    assert all(reason in ("stop", "length") and text for reason, text in answers)
    wait_for(demo.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(demo, stream):
    body = {"model": "demo", "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=demo.url, timeout=1.0) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
    left = time.monotonic()
    wait_for(demo.is_idle)
    assert time.monotonic() - left < 2.0
    assert demo.stats()["totals"]["num_finished_requests"]["cancelled"] >= 1


def test_a_core_killed_with_9_fails_what_is_pending_and_ends_the_server(start):
    server = start().wait_ready()
    with server.openai() as client:
        stream = iter(
            client.completions.create(
                model="demo", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(stream)
        os.kill(server.core, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(APIError, match=r"signal 9|SIGKILL|killed"):
            list(stream)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_dead"
        assert time.monotonic() - killed < 2.0
    server.check_gone(1, 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_short_requests_finish_and_cuts_endless_ones_within_the_bound(start, number):
    server = start().wait_ready()
    with server.openai() as client:
        short, endless = (
            iter(
                client.completions.create(
                    model="demo", prompt="a", max_tokens=limit, stream=True, extra_body={"ignore_eos": True}
                )
            )
            for limit in (20, 8000)
        )
        next(short)
        next(endless)
        # A terminal's Ctrl-C reaches the whole group, a supervisor's SIGTERM only the first process.
        if number == signal.SIGINT:
            os.killpg(server.process.pid, number)
        else:
            server.process.send_signal(number)
        signalled = time.monotonic()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 2.0)
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert list(short)[-1].choices[0].finish_reason == "length"
        with pytest.raises(APIError):
            list(endless)
    server.check_gone(0, 10)
    assert time.monotonic() - signalled < 5.0


def test_a_second_signal_does_not_wait_for_what_runs(start):
    server = start("--drain_timeout_s", "60").wait_ready()
    with server.openai() as client:
        endless = iter(
            client.completions.create(
                model="demo", prompt="a", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(endless)
        os.killpg(server.process.pid, signal.SIGINT)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 2.0)
        assert server.process.poll() is None
        os.killpg(server.process.pid, signal.SIGINT)
        with pytest.raises(APIError):
            list(endless)
    server.check_gone(128 + signal.SIGINT, 3)


def test_a_model_that_is_not_there_is_one_sentence_and_exit_code_2():
    command = [sys.executable, "-m", "headrace", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "/no/such/model" in done.stderr and "Traceback" not in done.stderr


def test_a_signal_while_loading_ends_everything(start):
    server = start()
    wait_for(lambda: "loading" in server.log, START_SECONDS)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    server.core = int(children[0]) if children else 0
    server.process.send_signal(signal.SIGTERM)
    server.check_gone(128 + signal.SIGTERM, 5)


def test_a_port_in_use_is_one_sentence_and_exit_code_2_before_the_model_loads(demo_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "serve", demo_model, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert f"Port {port} on 127.0.0.1 is in use" in done.stderr and "Traceback" not in done.stderr
    assert "loading" not in done.stderr
