# SPDX-License-Identifier: Apache-2.0
"""What KV cache dtypes cost in quality: the demo model's perplexity over fixed texts, against a bfloat16 cache.

    python -m benchmarks.engine.kv_quality [--model MODEL] [--report_json FILE]

The texts are the one of `demo_distance` and the licence of this repository, read in chunks of 64 tokens, so that most
keys and values come from the cache; the same for every dtype.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from benchmarks.engine.demo_distance import TEXT
from benchmarks.record import provenance
from headrace import LLM, SamplingParams

DTYPES = ("bfloat16", "float32", "fp8", "int8")
CHUNK = 64
LICENCE = Path(__file__).parents[2] / "LICENSE"


def text_losses(model: str, kv_dtype: str, texts: list[str], **settings: object) -> list[list[float]]:
    """-log p of every token of the texts after its first, by an engine that keeps its KV cache in `kv_dtype`."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses = []
    with LLM(
        model,
        kv_cache_config={"dtype": kv_dtype},
        enable_chunked_prefill=True,
        max_num_tokens=CHUNK,
        max_batch_size=1,
        max_seq_len=8192,
        **settings,
    ) as llm:
        for output in llm.generate(texts, params, use_tqdm=False):
            found = output.prompt_logprobs
            assert found is not None
            ids = output.prompt_token_ids
            losses.append([-entry[token].logprob for entry, token in zip(found[1:], ids[1:], strict=True) if entry])
    return losses


def perplexity(losses: list[list[float]]) -> float:
    """Over all texts' tokens."""
    every = [loss for text in losses for loss in text]
    return math.exp(sum(every) / len(every))


def main() -> None:
    """Print a line for each dtype, and write them with the machine's facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--report_json", type=Path)
    wanted = parser.parse_args()
    texts = [TEXT, LICENCE.read_text()]
    found: dict[str, float] = {}
    for dtype in DTYPES:
        losses = text_losses(wanted.model, dtype, texts)
        found[dtype] = perplexity(losses)
        change = found[dtype] / found[DTYPES[0]] - 1
        num_tokens = sum(map(len, losses))
        sys.stdout.write(f"{dtype:>9}: perplexity {found[dtype]:.4f} ({change:+.3%}) over {num_tokens} tokens\n")
    if wanted.report_json:
        report = {**provenance(), "model": wanted.model, "chunk": CHUNK, "perplexity": found}
        wanted.report_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
