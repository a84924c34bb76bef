# SPDX-License-Identifier: Apache-2.0
"""The demo model in fp32 gives Transformers' greedy tokens, on 30 prompts of many kinds.

The reference is teacher-forced: Transformers reads each prompt and our 64 tokens in one pass, and its argmax at every
position must be our next token. Up to the first difference that is the same as its own greedy run.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams

MAX_TOKENS = 64
LONG = "The river runs down from the hills, past the mill and under the bridge, and every spring it rises. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self",
    "SELECT name, count(*) FROM users WHERE",
    "你好，请介绍一下北京。",
    "春天来了，",
    "今日は天気が",
    "Привет, как дела?",
    "مرحبا، كيف",
    "😀😃😄 smile",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "1 2 3 4 5 6 7",
    "2 + 2 =",
    "\n\n\n",
    "    indented",
    "a",
    "The",
    "!!!???",
    "<html>\n<body>\n<p>",
    '{"name": "Ana", "age":',
    "Q: What is the boiling point of water?\nA:",
    "- apples\n- pears\n-",
    "na na na na na",
    "ALL CAPS SENTENCE ABOUT",
    "Dear Sir or Madam,\n\nI am writing",
    "x = [i**2 for i in range(10)]\nprint(",
    "Der schnelle braune Fuchs",
    LONG * 12,
    LONG * 95,
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(demo_model: str, device: str) -> Iterator[torch.nn.Module]:
    path = Path(demo_model)
    quantized = {}
    if "GgufConfig" in dir(transformers):  # later versions keep GGUF weights packed unless told otherwise
        quantized["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **quantized
    )
    yield model.eval().to(device)


@pytest.mark.slow
def test_the_demo_gives_transformers_greedy_tokens(reference: torch.nn.Module, demo_model: str, device: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(demo_model, dtype="float32", device=device, max_seq_len=4096) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        single_token = llm.generate([[504]], params, use_tqdm=False)
        again = llm.generate(PROMPTS[-2:], params, use_tqdm=False)
    assert max(len(o.prompt_token_ids) for o in outputs) > 1900
    for output in [*outputs, *single_token]:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert len(output.outputs[0].token_ids) == MAX_TOKENS
        start = len(output.prompt_token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]], device=device)).logits[0, start - 1 :].float().cpu()
        for i, token in enumerate(ids[start:]):
            top = logits[i].topk(2)
            if int(top.indices[0]) != token:
                gap = float(top.values[0] - logits[i, token])
                assert gap < 1e-3, f"{output.prompt!r}: token {i} is {token}, not {int(top.indices[0])} (gap {gap:.4f})"
                break
    for cold, warm in zip(outputs[-2:], again, strict=True):
        assert warm.num_cached_tokens > 0
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
