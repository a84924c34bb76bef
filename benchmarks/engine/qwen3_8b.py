# SPDX-License-Identifier: Apache-2.0
"""One GPU, the Qwen3-8B shape with random bf16 weights: decode, prefill and 64-way throughput through the LLM API.

    python -m benchmarks.engine.qwen3_8b [--deterministic] [--report_json FILE]

Prompts are random token ids, all different, so no prefix is shared; greedy, `ignore_eos`, no detokenizing.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import provenance

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def prompt_ids(length: int, seed: int) -> list[int]:
    """Deterministic token ids, different for every seed from the first token on."""
    return [(seed * 7919 + i * 104729 + seed * i) % 150000 for i in range(length)]


async def stream(llm, ids: list[int], max_tokens: int) -> tuple[float, float, int]:
    """Seconds to the first token, seconds to the last, and the number of tokens."""
    from headrace import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start, first, count = time.perf_counter(), 0.0, 0
    async for output in llm.generate_async(ids, params):
        count = len(output.outputs[0].token_ids)
        first = first or time.perf_counter() - start
    return first, time.perf_counter() - start, count


async def run(llm) -> dict[str, object]:
    """All sections; seeds differ between repeats so that no prompt is seen twice."""
    await stream(llm, prompt_ids(128, 1), 16)
    await asyncio.gather(*(stream(llm, prompt_ids(256, 10 + i), 8) for i in range(64)))
    report: dict[str, object] = {}
    decode = []
    for seed in (101, 102):
        first, last, count = await stream(llm, prompt_ids(128, seed), 256)
        decode.append((last - first) / (count - 1))
    report["decode_batch_1_tpot_ms"] = [1e3 * t for t in decode]
    for length in (2048, 8192):
        times = [(await stream(llm, prompt_ids(length, 200 + length + i), 1))[0] for i in range(3)]
        report[f"prefill_{length}_ms"] = sorted(1e3 * t for t in times)
        report[f"prefill_{length}_tokens_per_s"] = length / sorted(times)[1]
    start = time.perf_counter()
    results = await asyncio.gather(*(stream(llm, prompt_ids(1024, 1000 + i), 256) for i in range(64)))
    wall = time.perf_counter() - start
    report["concurrency_64_isl_1024_osl_256"] = {
        "output_tokens_per_s": sum(r[2] for r in results) / wall,
        "ttft_median_ms": 1e3 * sorted(r[0] for r in results)[32],
        "tpot_mean_ms": 1e3 * sum((r[1] - r[0]) / (r[2] - 1) for r in results) / 64,
    }
    return report


def main() -> None:
    """Start the engine on random weights, run the sections, print and save the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report_json", default=None)
    parser.add_argument("--deterministic", action="store_true", help="what equal answers cost")
    args = parser.parse_args()
    from headrace import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        start = time.perf_counter()
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "deterministic": args.deterministic}
        with LLM(folder, max_seq_len=16384, **settings) as llm:
            ready = time.perf_counter() - start
            report = asyncio.run(run(llm))
    report = (
        {"benchmark": "qwen3_8b", "deterministic": args.deterministic, "start_s": ready}
        | report
        | provenance("transformers")
    )
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if args.report_json:
        Path(args.report_json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
