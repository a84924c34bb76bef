# SPDX-License-Identifier: Apache-2.0
"""The commands below `headrace bench`, as data. Names of options are TensorRT-LLM's where it has them."""

from headrace.cli.bench_alias import DATASET_ALIASES, DATASET_REFUSED, ENGINE_ALIASES, ENGINE_REFUSED
from headrace.cli.command import CONFIG, LOG_LEVEL, Command, Group, Option

WORK, LOAD, REPORT = "Workload", "Load", "Report"

DATASET = (
    Option("dataset", "file of requests, a line each (`bench prepare-dataset` writes one)", metavar="FILE", group=WORK),
    Option("num_requests", "requests of each level (default: the whole file, or 4 x concurrency)", "int",
           metavar="N", group=WORK),
)  # fmt: skip
SYNTHETIC = (
    Option("input_len", "without --dataset: prompt tokens, drawn at random (default: 1024; 128 on a CPU)", "int",
           metavar="N", group=WORK),
    Option("output_len", "without --dataset: output tokens (default: 256; 32 on a CPU)", "int",
           metavar="N", group=WORK),
    Option("random_seed", "of the random prompts; each level takes its own from it (default: 0)", "int",
           metavar="N", default=0, group=WORK),
)  # fmt: skip
SAMPLING = (
    Option("temperature", "0 is greedy (default: 0)", "float", metavar="X", default=0.0, group=WORK),
    Option("ignore_eos", "go on past the model's end tokens, to the full length (default: on)", "flag",
           default=True, group=WORK),
    Option("warm_cache", "prompts may be served from the prefix cache; without it a run that was is marked", "flag",
           default=False, group=WORK),
)  # fmt: skip
OUTPUT = (
    Option("report_json", "write the report to this file", metavar="FILE", group=REPORT),
    Option("plot", "draw throughput against latency over the levels: .png, .svg or .html", metavar="FILE",
           group=REPORT),
    Option("ceilings", "file with the hardware's ceilings, in place of those measured here once", metavar="FILE",
           group=REPORT),
    LOG_LEVEL,
)  # fmt: skip
MODEL_PATH = Option("model_path", "the model's folder, where --model is only what to call it", metavar="DIR")
ENGINE_ONLY = (
    Option("concurrency", "requests in flight, or several levels: 1,8,64 (default: max_batch_size; at most 8 on a CPU)",
           "ints", metavar="N[,N...]", group=LOAD),
    Option("warmup", "requests before the first level that are not counted (default: 2)", "int",
           metavar="N", default=2, group=LOAD),
    Option("streaming", "take tokens as they come; off: whole answers, without TTFT and inter-token latency "
           "(default: on)", "flag", default=True, group=LOAD),
    Option("trace_steps", "decode steps to trace after each level, for the split of a step (default: 32; 0 on a CPU)",
           "int", metavar="N", group=REPORT),
)  # fmt: skip
TARGET = (
    Option("url", "an OpenAI-compatible server: http://127.0.0.1:8000", metavar="URL", group="Server"),
    Option("model", "the model to ask for (default: the server's first)", metavar="NAME", group="Server"),
    Option("endpoint", "completions, which takes token ids, or chat (default: completions)", metavar="NAME",
           default="completions", group="Server"),
    Option("api_key", "key to send (default: OPENAI_API_KEY of the environment)", metavar="KEY", group="Server"),
    Option("extra_body", "more fields for every request, as JSON", metavar="JSON", group="Server"),
    Option("model_path", "the model's folder or name here: its shapes for the roofline, its tokenizer for text",
           metavar="MODEL", group="Server"),
    Option("num_gpus", "GPUs that the server runs on (default: 1)", "int", metavar="N", default=1, group="Server"),
)  # fmt: skip
ARRIVALS = (
    Option("max_concurrency", "most requests in flight, or several levels: 1,8,64 (default: no limit)", "ints",
           metavar="N[,N...]", group=LOAD),
    Option("request_rate", "requests per second, on average (default: each as soon as it may)", "float",
           metavar="R", group=LOAD),
    Option("burstiness", "1: Poisson; below: in bursts; above: more even (default: 1)", "float",
           metavar="X", default=1.0, group=LOAD),
    Option("warmup", "requests before the first level that are not counted (default: 2)", "int",
           metavar="N", default=2, group=LOAD),
)  # fmt: skip

WHERE_TO = (
    Option("output", "file to write, or - for the terminal", short="-o", metavar="FILE"),
    Option("model", "whose vocabulary to draw from", metavar="MODEL"),
    Option("tokenizer", "the same, by TensorRT-LLM's name", metavar="MODEL"),
    Option("vocab_size", "or its size alone: ids from 0 to this, exclusive", "int", metavar="N"),
    Option("num_requests", "lines to write", "int", metavar="N"),
    Option("random_seed", "of the random ids and lengths (default: 420)", "int", metavar="N", default=420),
    Option("text", "write text in place of token ids, for chat (needs a model)", "flag", default=False),
    LOG_LEVEL,
)


def _lengths(name: str) -> tuple[Option, ...]:
    """Mean and deviation of the tokens of a part."""
    return (
        Option(f"{name}_mean", f"{name} tokens, on average", "int", metavar="N"),
        Option(f"{name}_stdev", "their standard deviation (default: 0)", "float", metavar="X", default=0.0),
    )


PREPARE = "bench prepare-dataset"
PREPARE_ENTRY = "headrace.cli.bench_dataset"


def _prepare(
    name: str, summary: str, options: tuple[Option, ...], example: str, without: tuple[str, ...] = ()
) -> Command:
    """without: shared options that make no sense for it."""
    entry = f"{PREPARE_ENTRY}:{name.replace('-', '_')}"
    shared = tuple(option for option in WHERE_TO if option.name not in without)
    return Command(
        f"{PREPARE} {name}",
        summary,
        entry,
        trees=(),
        options=(*options, *shared),
        arguments="none",
        aliases=DATASET_ALIASES,
        refused=DATASET_REFUSED,
        example=f"headrace {PREPARE} {name} {example}",
    )


BENCH = (
    Command(
        "bench throughput",
        "the engine's limit: a closed loop over a model loaded here",
        "headrace.cli.bench:throughput",
        options=(MODEL_PATH, *DATASET, *SYNTHETIC, *SAMPLING, *ENGINE_ONLY, *OUTPUT, CONFIG),
        model_is_optional=True,
        aliases=ENGINE_ALIASES,
        refused=ENGINE_REFUSED,
        example="headrace bench throughput demo --concurrency 1,4,8 --report_json run.json --plot run.html",
    ),
    Command(
        "bench latency",
        "the same at low concurrency: 1 unless told otherwise",
        "headrace.cli.bench:latency",
        options=(MODEL_PATH, *DATASET, *SYNTHETIC, *SAMPLING, *ENGINE_ONLY, *OUTPUT, CONFIG),
        model_is_optional=True,
        aliases=ENGINE_ALIASES,
        refused=ENGINE_REFUSED,
        example="headrace bench latency demo --input_len 128 --output_len 64",
    ),
    Command(
        "bench serve",
        "load on an OpenAI-compatible server, ours or another",
        "headrace.cli.bench:serve",
        trees=(),
        options=(*TARGET, *DATASET, *SYNTHETIC, *SAMPLING, *ARRIVALS, *OUTPUT),
        arguments="none",
        example="headrace bench serve --url http://127.0.0.1:8000 --dataset set.jsonl --request_rate 4",
    ),
    _prepare(
        "token-norm-dist",
        "random ids, lengths from a normal distribution",
        (*_lengths("input"), *_lengths("output")),
        "--model demo --num_requests 256 --input_mean 1024 --output_mean 256 --output set.jsonl",
    ),
    _prepare(
        "token-unif-dist",
        "random ids, lengths evenly between two bounds",
        (
            Option("input_min", "fewest prompt tokens", "int", metavar="N"),
            Option("input_max", "most prompt tokens", "int", metavar="N"),
            Option("output_min", "fewest output tokens", "int", metavar="N"),
            Option("output_max", "most output tokens", "int", metavar="N"),
        ),
        "--model demo --num_requests 256 --input_min 128 --input_max 2048 --output_min 16 --output_max 256 "
        "--output set.jsonl",
    ),
    _prepare(
        "shared-prefix",
        "groups of requests that begin alike",
        (
            Option("prefix_len", "tokens that the requests of a group share", "int", metavar="N"),
            Option("num_prefixes", "groups (default: 1)", "int", metavar="N", default=1),
            *_lengths("input"),
            *_lengths("output"),
        ),
        "--model demo --num_requests 64 --prefix_len 512 --input_mean 64 --output_mean 64 --output set.jsonl",
    ),
    _prepare(
        "multi-turn",
        "conversations; each turn's prompt is all that was said before and something new",
        (
            Option("num_conversations", "conversations", "int", metavar="N"),
            Option("num_turns", "turns of each", "int", metavar="N"),
            *_lengths("input"),
            *_lengths("output"),
        ),
        "--model demo --num_conversations 16 --num_turns 4 --input_mean 64 --output_mean 64 --output set.jsonl",
        without=("num_requests",),
    ),
    _prepare(
        "from-jsonl",
        "real requests: lines with `messages`, `prompt` or `conversations`",
        (
            Option("input", "file of real requests", metavar="FILE"),
            Option("output_mean", "output tokens of a line that does not say", "int", metavar="N"),
        ),
        "--model demo --input requests.jsonl --output set.jsonl",
        without=("vocab_size", "random_seed", "text"),
    ),
    Command(
        "bench compare",
        "two or more report files side by side",
        "headrace.cli.bench:compare",
        trees=(),
        options=(
            Option("plot", "draw their levels into one picture: .png, .svg or .html", metavar="FILE"),
            LOG_LEVEL,
        ),
        arguments="files",
        example="headrace bench compare before.json after.json --plot both.html",
    ),
)

BENCH_GROUPS = (
    Group("bench", "measure throughput and latency, as a share of what the hardware allows"),
    Group(PREPARE, "write a file of requests for `bench`"),
)
