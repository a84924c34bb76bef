# SPDX-License-Identifier: Apache-2.0
"""A model folder with a byte tokenizer and no weights, and engines whose worker is a fake."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions
from headrace.engine.detokenizer import LETTER_OF

VOCAB_SIZE = 300
EOS = 257
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no role ' + m['role']) }}{% endif %}"
    "<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "eos_token_id": EOS,
    "bos_token_id": 256,
    "torch_dtype": "float32",
}


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, for i under 256; then <|start|>, <|end|>, and a token that is not special."""
    backend = Tokenizer(BPE(vocab={LETTER_OF[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|start|>", "<|end|>")]
    backend.add_tokens([*special, AddedToken("<think>", special=False, normalized=False)])
    return backend


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
