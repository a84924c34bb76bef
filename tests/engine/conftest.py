# SPDX-License-Identifier: Apache-2.0
"""A folder with a tiny model, and engines whose worker is a fake."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tiny_model import CONFIG, TEMPLATE, byte_tokenizer

from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def args(model_folder: Path) -> LlmArgs:
    return LlmArgs(model=str(model_folder), load_format="dummy", max_batch_size=8, max_num_tokens=64)


@pytest.fixture
def core_options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CoreOptions]:
    """Makes options for a core with a worker of `fake_worker`; a process of its own unless told otherwise."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    monkeypatch.syspath_prepend(here)

    def make(worker: str = "FakeWorker", in_process: bool = False) -> CoreOptions:
        return CoreOptions(
            in_process=in_process, worker=f"fake_worker:{worker}", device_facts="fake_worker:device_facts"
        )

    return make


@pytest.fixture
def engine(args: LlmArgs, core_options: Callable[..., CoreOptions]) -> Callable[..., object]:
    """`async with engine(worker): ...` is a started AsyncLLM."""

    @asynccontextmanager
    async def start(worker: str = "FakeWorker", in_process: bool = True) -> AsyncIterator[AsyncLLM]:
        llm = AsyncLLM(args, core=core_options(worker, in_process))
        await llm.start()
        try:
            yield llm
        finally:
            llm.shutdown()

    return start


@pytest.fixture
def run() -> Iterator[Callable[[Awaitable[None]], None]]:
    """Runs a coroutine to its end, which must come within a minute."""

    def go(coroutine: Awaitable[None]) -> None:
        asyncio.run(asyncio.wait_for(coroutine, 60))

    yield go
