# SPDX-License-Identifier: Apache-2.0
"""Engines under `deterministic: true`, requests of every kind, and what comes of each, to the last bit."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny_gguf

from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.output import TokenLogprobs
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.utils.hub import ModelSource
from headrace.worker.device import device_facts
from headrace.worker.worker import Worker

TINY = {
    "vocab_size": 333, "hidden_size": 160, "intermediate_size": 424, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.2, "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = TINY | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 4,
}  # fmt: skip
QWEN3 = TINY | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1, "intermediate_size": 1600,
}  # fmt: skip
GEMMA = TINY | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 70,
    "query_pre_attn_scalar": 32,
    "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 20.0, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Bench:
    """A worker that serves one scheduler after the other."""

    worker: Worker
    config: ResolvedConfig
    layout: CacheLayout

    def scheduler(self, **limits: Any) -> Scheduler:
        """An empty cache and limits of its own."""
        layout = limits.pop("layout", self.layout)
        return Scheduler.from_config(replace(self.config, **limits), layout)


def started(
    model: dict[str, Any] | str, folder: Path, device: str = "cpu", deterministic: bool = True, **settings: Any
) -> Bench:
    """model: a config, run with random weights, or a GGUF type, in which a file is written to `folder`."""
    kv = {"dtype": settings.pop("kv", "auto"), "tokens_per_block": 16, "max_tokens": 8000}
    settings = {"dtype": "bfloat16", "num_threads": 2} | settings
    args = LlmArgs(
        model="tiny", load_format="dummy" if isinstance(model, dict) else "auto", device=device, max_batch_size=6,
        max_num_tokens=1024, max_seq_len=240 if isinstance(model, str) else 800, seed=3, deterministic=deterministic,
        kv_cache_config=kv, **settings,
    )  # fmt: skip
    source = ModelSource("hf", folder, "tiny", "tiny")
    cfg = ModelConfig.from_hf(model) if isinstance(model, dict) else None
    if isinstance(model, str):
        path = tiny_gguf.write_gguf(folder / "tiny.gguf", tiny_gguf.random_weights(), kind=model)
        source = ModelSource("gguf", path, "tiny", "tiny")
        cfg = load_model_config(source)
    assert cfg is not None
    config = resolve(args, cfg, device_facts(device))
    worker = Worker(config, source)
    return Bench(worker, config, worker.start(None).layout)


@dataclass
class Outcome:
    """What came of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    num_cached: int = field(default=0, compare=False)


def requests(bench: Bench) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompts of a token to several units of attention, some that share whole blocks or parts of one; every sampler."""
    vocab, most = bench.config.model.vocab_size, bench.config.max_seq_len - 30
    rng = random.Random(5)
    shared = [rng.randrange(4, vocab) for _ in range(most)]
    lengths = {"one": 1, "few": 5, "edge": 16, "some": 77, "more": 190, "many": most}
    made: dict[str, tuple[list[int], dict[str, Any]]] = {
        name: ([rng.randrange(4, vocab) for _ in range(length)], {}) for name, length in lengths.items()
    }
    made["shared"] = (shared[: most - 8], {"prompt_logprobs": 2})
    made["partial"] = ([*shared[: most // 2 + 7], 5, 6, 7], {})
    made["drawn"] = (shared[:90], {"temperature": 0.9, "top_p": 0.9, "seed": 4})
    made["edited"] = (shared[:33], {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}})
    return made


def run(
    bench: Bench, scheduler: Scheduler, wanted: dict[str, tuple[list[int], dict[str, Any]]], depth: int, seed: int = -1
) -> dict[str, Outcome]:
    """All of them. seed: they come one after the other, at random; -1: at once."""
    rng, todo, flight = random.Random(seed), list(wanted), deque[Any]()
    found = {name: Outcome([], [], []) for name in wanted}
    if seed >= 0:
        rng.shuffle(todo)
    while todo or scheduler.has_work() or flight:
        while todo and (seed < 0 or rng.random() < 0.4 or not scheduler.has_work()):
            name = todo.pop()
            prompt, spec = wanted[name]
            settings = {"temperature": 0.0, "max_tokens": 9, "logprobs": 3} | spec
            scheduler.add_request(Request(name, prompt, SamplingSpec(**settings)))
        while len(flight) < depth and (plan := scheduler.schedule()) is not None:
            bench.worker.forward(plan)
            flight.append((plan, bench.worker.sample(plan)))
        if flight:
            plan, pending = flight.popleft()
            for delta in scheduler.update(plan, pending.wait()):
                assert delta.error is None, delta.error
                outcome = found[delta.request_id]
                outcome.num_cached = delta.num_cached_tokens
                outcome.tokens += delta.new_token_ids
                outcome.logprobs += delta.logprobs or []
                outcome.prompt_logprobs += delta.prompt_logprobs or []
    return found


def alone(bench: Bench, wanted: dict[str, tuple[list[int], dict[str, Any]]]) -> dict[str, Outcome]:
    """Each in an engine of its own, its prompt in one step, one plan at a time."""
    found = {}
    for name, one in wanted.items():
        found |= run(bench, bench.scheduler(max_prefill_tokens=1024, enable_block_reuse=False), {name: one}, 1)
    assert len({tuple(outcome.tokens) for outcome in found.values()}) == len(found)
    return found
