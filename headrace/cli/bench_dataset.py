# SPDX-License-Identifier: Apache-2.0
"""`headrace bench prepare-dataset KIND`: one function for each kind."""

from collections.abc import Sequence
from typing import Any

from headrace.bench import workload
from headrace.bench.dataset import BenchRequest, with_text, write_dataset
from headrace.bench.real_requests import read_real_requests
from headrace.bench.workload import Lengths
from headrace.cli.flags import Invocation
from headrace.cli.settings import set_log_level
from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ConfigError
from headrace.logger import get_logger
from headrace.utils.hub import resolve_model

logger = get_logger(__name__)


def token_norm_dist(invocation: Invocation) -> int:
    """Random ids, lengths from a normal distribution."""
    options = _options(invocation)
    return _write_random(options, _normal(options, "input"), _normal(options, "output"))


def token_unif_dist(invocation: Invocation) -> int:
    """Random ids, lengths evenly between two bounds."""
    options = _options(invocation)
    return _write_random(options, _even(options, "input"), _even(options, "output"))


def shared_prefix(invocation: Invocation) -> int:
    """Groups of requests that begin alike."""
    options = _options(invocation)
    requests = workload.shared_prefix(
        _count(options),
        _needed(options, "num_prefixes"),
        _needed(options, "prefix_len"),
        _normal(options, "input"),
        _normal(options, "output"),
        _vocab_size(options),
        options["random_seed"],
    )
    return _write(options, requests)


def multi_turn(invocation: Invocation) -> int:
    """Conversations."""
    options = _options(invocation)
    requests = workload.multi_turn(
        _needed(options, "num_conversations"),
        _needed(options, "num_turns"),
        _normal(options, "input"),
        _normal(options, "output"),
        _vocab_size(options),
        options["random_seed"],
    )
    return _write(options, requests)


def from_jsonl(invocation: Invocation) -> int:
    """Real requests."""
    options = _options(invocation)
    if not options["input"]:
        raise ConfigError("from-jsonl needs a file of real requests: --input FILE.", param="input")
    tokenizer = _tokenizer(options)
    count = None if options["num_requests"] is None else _count(options)
    return _write(options, read_real_requests(options["input"], tokenizer, options["output_mean"], count))


def _options(invocation: Invocation) -> dict[str, Any]:
    """The command's options; what its flags became is said."""
    set_log_level(invocation.options["log_level"])
    for sentence in invocation.became:
        logger.info("%s", sentence)
    return invocation.options


def _write_random(options: dict[str, Any], input_lens: Lengths, output_lens: Lengths) -> int:
    count, size, seed = _count(options), _vocab_size(options), options["random_seed"]
    return _write(options, workload.random_requests(count, input_lens, output_lens, size, seed))


def _write(options: dict[str, Any], requests: Sequence[BenchRequest]) -> int:
    if not options["output"]:
        raise ConfigError("Where to? Give --output FILE, or --output - for the terminal.", param="output")
    if options.get("text"):
        requests = with_text(requests, _tokenizer(options).decode)
    write_dataset(requests, options["output"])
    return 0


def _needed(options: dict[str, Any], name: str) -> int:
    """A whole number from 1 that must be given. Raises ConfigError."""
    value = options[name]
    if value is None:
        raise ConfigError(f"--{name} is needed: a whole number from 1.", param=name)
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, but is {value}.", param=name)
    return int(value)


def _count(options: dict[str, Any]) -> int:
    return _needed(options, "num_requests")


def _normal(options: dict[str, Any], part: str) -> Lengths:
    stdev = options[f"{part}_stdev"]
    if not 0.0 <= stdev < float("inf"):
        raise ConfigError(f"{part}_stdev must not be negative, but is {stdev:g}.", param=f"{part}_stdev")
    return Lengths(_needed(options, f"{part}_mean"), stdev)


def _even(options: dict[str, Any], part: str) -> Lengths:
    low, high = _needed(options, f"{part}_min"), _needed(options, f"{part}_max")
    if low > high:
        raise ConfigError(f"{part}_min ({low}) must not be over {part}_max ({high}).", param=f"{part}_min")
    return Lengths.between(low, high)


def _model(options: dict[str, Any]) -> str | None:
    model: str | None = options["model"] or options["tokenizer"]
    return model


def _vocab_size(options: dict[str, Any]) -> int:
    if options["vocab_size"] is not None:
        return _needed(options, "vocab_size")
    model = _model(options)
    if model is None:
        raise ConfigError("Whose token ids? Give --model MODEL, or --vocab_size N.", param="model")
    return load_model_config(resolve_model(model, need_weights=False)).vocab_size


def _tokenizer(options: dict[str, Any]) -> Tokenizer:
    model = _model(options)
    if model is None:
        raise ConfigError("Text needs a tokenizer: give --model MODEL.", param="model")
    return load_tokenizer(resolve_model(model, need_weights=False), LlmArgs(model=model))
