# SPDX-License-Identifier: Apache-2.0
"""The demo model on this CPU: Headrace beside llama.cpp (same file) and Transformers (bf16), best of several rounds.

    python -m benchmarks.engine.cpu_demo [--threads 2] [--rounds 3] [--report_json FILE]

Each round runs the engines one after the other, so that a busy machine hurts them alike. Decode: the rate between the
first and the last of 128 tokens after a 64-token prompt. Prefill: 512 prompt tokens over the time to the first token.
Concurrent: eight such streams at once, total tokens per second over the time from the first token to the last.
The report also says what the speed costs: the mean KL divergence from the same file in fp32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import provenance

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PROMPT_LEN, DECODE_LEN, PREFILL_LEN, STREAMS = 64, 128, 512, 8


def prompt_ids(length: int, seed: int) -> list[int]:
    """Deterministic token ids, different for every seed so that no prefix is shared."""
    return [(seed * 7919 + i * 104729) % 40000 + 500 for i in range(length)]


def bench_headrace(model: str, threads: int, seed: int, deterministic: bool = False) -> dict[str, float]:
    """Decode, prefill and concurrent tokens per second of Headrace with its defaults for the demo."""
    import asyncio

    from headrace import LLM, SamplingParams

    async def stream(llm, ids: list[int], max_tokens: int, times: list[float]) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for output in llm.generate_async(ids, params):
            times.extend([time.perf_counter()] * len(output.outputs[0].token_ids_diff))

    async def run(llm) -> dict[str, float]:
        await stream(llm, prompt_ids(PROMPT_LEN, seed), 8, [])
        times: list[float] = []
        await stream(llm, prompt_ids(PROMPT_LEN, seed + 1), DECODE_LEN, times)
        decode = (len(times) - 1) / (times[-1] - times[0])
        start, first = time.perf_counter(), []
        await stream(llm, prompt_ids(PREFILL_LEN, seed + 2), 1, first)
        prefill = PREFILL_LEN / (first[0] - start)
        all_times: list[float] = []
        await asyncio.gather(
            *(stream(llm, prompt_ids(PROMPT_LEN, seed + 10 + i), DECODE_LEN, all_times) for i in range(STREAMS))
        )
        all_times.sort()
        concurrent = (len(all_times) - 1) / (all_times[-1] - all_times[0])
        return {"decode": decode, "prefill": prefill, "concurrent": concurrent}

    with LLM(model, num_threads=threads, deterministic=deterministic) as llm:
        return asyncio.run(run(llm))


def bench_llama_cpp(model: str, threads: int, seed: int) -> dict[str, float]:
    """The same through llama.cpp's own server, timings as it reports them."""
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 4096
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.hostnames, params.port = ["127.0.0.1"], 18500 + os.getpid() % 1000
    server = xllamacpp.Server(params)

    def complete(length: int, max_tokens: int, salt: int) -> dict[str, float]:
        body = {
            "prompt": prompt_ids(length, seed + salt),
            "n_predict": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{params.port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request))["timings"]

    complete(PROMPT_LEN, 8, 0)
    decode = complete(PROMPT_LEN, DECODE_LEN, 1)["predicted_per_second"]
    prefill = complete(PREFILL_LEN, 1, 2)["prompt_per_second"]
    del server
    return {"decode": decode, "prefill": prefill}


def bench_transformers(model: str, threads: int, seed: int) -> dict[str, float]:
    """`generate` of Transformers in bf16."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    path = Path(model)
    extra = {}
    if "GgufConfig" in dir(transformers):
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, **extra
    ).eval()

    def generate(length: int, max_tokens: int, salt: int) -> float:
        ids = torch.tensor([prompt_ids(length, seed + salt)])
        start = time.perf_counter()
        with torch.inference_mode():
            reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - start

    generate(PROMPT_LEN, 4, 0)
    first = generate(PROMPT_LEN, 1, 1)
    decode = 31 / (generate(PROMPT_LEN, 32, 1) - first)
    return {"decode": decode, "prefill": PREFILL_LEN / generate(PREFILL_LEN, 1, 2)}


def measure_distance(model: str, threads: int, seed: int) -> dict[str, float]:
    """Mean KL to Headrace's own fp32 over a fixed text (see `demo_distance`): `decode` and `prefill`."""
    from benchmarks.engine.demo_distance import kl_to_fp32

    return {way: float(distances.mean()) for way, distances in kl_to_fp32(model, threads).items()}


def bench_deterministic(model: str, threads: int, seed: int) -> dict[str, float]:
    """Headrace under `deterministic: true`: its ratio is what that costs."""
    return bench_headrace(model, threads, seed, deterministic=True)


ENGINES = {
    "headrace": bench_headrace,
    "deterministic": bench_deterministic,
    "llama.cpp": bench_llama_cpp,
    "transformers": bench_transformers,
}
DISTANCE = "distance"


def run_engine(engine: str, model: str, threads: int, seed: int) -> dict[str, float]:
    """One engine's figures, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.cpu_demo", "--one", engine, "--model", model]
    command += ["--threads", str(threads), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.stderr.write(done.stderr[-2000:])
        raise SystemExit(f"{engine} failed")
    return json.loads(lines[0].removeprefix("RESULT "))


def best_of(results: list[dict[str, float]]) -> dict[str, float]:
    """Each figure's best round."""
    return {key: max(result[key] for result in results) for key in results[0]}


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Headrace's figures over the others'."""
    ours = figures["headrace"]
    found = {"concurrent / single stream": ours["concurrent"] / ours["decode"]}
    for engine, theirs in figures.items():
        if engine != "headrace":
            found |= {f"{key} / {engine}": ours[key] / theirs[key] for key in theirs}
    return found


def median_ratios(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """The median over rounds of each ratio within a round; an engine that ran once stands for every round."""
    count = max(len(results) for results in rounds.values())
    each = [ratios({name: results[min(i, len(results) - 1)] for name, results in rounds.items()}) for i in range(count)]
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


def main() -> None:
    """Run every engine in a process of its own, `--rounds` times, and print the best of each and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="headrace,llama.cpp,transformers")
    parser.add_argument("--report_json", default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None:
        from headrace.utils.hub import resolve_model

        args.model = str(resolve_model("demo").path)
    if args.one:
        measure = measure_distance if args.one == DISTANCE else ENGINES[args.one]
        figures = measure(args.model, args.threads, args.seed)
        sys.stdout.write("RESULT " + json.dumps(figures) + "\n")
        sys.stdout.flush()
        os._exit(0)
    rounds: dict[str, list[dict[str, float]]] = {}
    for round_ in range(args.rounds):
        for engine in args.engines.split(","):
            if engine == "transformers" and round_ > 0:
                continue
            result = run_engine(engine, args.model, args.threads, seed=round_ * 100 + 1)
            sys.stdout.write(f"round {round_}: {engine}: {json.dumps({k: round(v, 1) for k, v in result.items()})}\n")
            sys.stdout.flush()
            rounds.setdefault(engine, []).append(result)
    distance = run_engine(DISTANCE, args.model, args.threads, seed=1)
    report = {
        "benchmark": "cpu_demo",
        "threads": args.threads,
        "tokens_per_second": rounds,
        "ratios_best": ratios({engine: best_of(results) for engine, results in rounds.items()}),
        "ratios_median_of_rounds": median_ratios(rounds),
        "kl_to_fp32_mean": distance["decode"],
        "kl_to_fp32_mean_prefill": distance["prefill"],
    } | provenance("transformers", "xllamacpp")
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if args.report_json:
        Path(args.report_json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
