# SPDX-License-Identifier: Apache-2.0
"""Files of requests, a JSON object a line: `task_id`, `prompt` or `input_ids`, `output_tokens`, as in TensorRT-LLM.

Two more keys are ours: `conversation` names the conversation that a line is a turn of (turns run in the order of their
lines, each after the one before it has ended), and `shares_prefix` says that the line is meant to be served from the
prefix cache in part.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

UNSUPPORTED = ("lora_request", "media_paths")
"""TensorRT-LLM's keys that ask for what is not built."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One line."""

    task_id: int | str
    output_tokens: int
    input_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    conversation: str | None = None
    shares_prefix: bool = False

    @property
    def is_warm(self) -> bool:
        """Whether it is meant to find a part of its prompt in the cache."""
        return self.shares_prefix or self.conversation is not None


def read_dataset(path: str) -> list[BenchRequest]:
    """The requests of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is no request; names the line and what it lacks.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"dataset {path} cannot be read: {reason}.", param="dataset") from None
    requests = [_parse(line, f"dataset {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"dataset {path} holds no request; see `headrace bench prepare-dataset`.", param="dataset")
    return requests


def _parse(line: str, where: str) -> BenchRequest:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.", param="dataset") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a JSON object with prompt or input_ids.", param="dataset")
    asked = next((key for key in UNSUPPORTED if values.get(key)), None)
    if asked is not None:
        raise ConfigError(f"{where} has {asked}, which is not supported yet; leave it out.", param="dataset")
    ids, prompt = values.get("input_ids"), values.get("prompt")
    if ids is None:
        # TensorRT-LLM writes the ids of synthetic sets as `logits` in older versions.
        ids = values.get("logits")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise ConfigError(f"{where}: input_ids must be a list of token ids with at least one.", param="dataset")
    if ids is None and not (isinstance(prompt, str) and prompt):
        raise ConfigError(f"{where} has no tokens: give input_ids, or prompt as text.", param="dataset")
    output = values.get("output_tokens")
    if type(output) is not int or output < 1:
        said = "has no output_tokens" if output is None else f"has output_tokens {output!r}"
        raise ConfigError(f"{where} {said}; it must be a whole number from 1.", param="dataset")
    conversation = values.get("conversation")
    return BenchRequest(
        task_id=values.get("task_id", where.rsplit(" ", 1)[-1]),
        output_tokens=output,
        input_ids=None if ids is None else tuple(ids),
        prompt=prompt if ids is None else None,
        conversation=None if conversation is None else str(conversation),
        shares_prefix=bool(values.get("shares_prefix")),
    )


def as_line(request: BenchRequest) -> str:
    """One request as it stands in a file."""
    values: dict[str, Any] = {"task_id": request.task_id}
    if request.input_ids is not None:
        values["input_ids"] = list(request.input_ids)
    else:
        values["prompt"] = request.prompt
    values["output_tokens"] = request.output_tokens
    if request.conversation is not None:
        values["conversation"] = request.conversation
    if request.shares_prefix:
        values["shares_prefix"] = True
    return json.dumps(values, ensure_ascii=False)


def write_dataset(requests: Iterable[BenchRequest], path: str) -> None:
    """Write a file, or to standard output for `-`. Raises ConfigError where it cannot be written."""
    text = "".join(f"{as_line(request)}\n" for request in requests)
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", param="output") from None


def check_lengths(requests: Sequence[BenchRequest], max_seq_len: int, vocab_size: int) -> None:
    """Refuse what the engine would refuse, before anything runs.

    Raises:
        ConfigError: a line is longer than `max_seq_len`, or has an id out of the vocabulary.
    """
    for request in requests:
        ids = request.input_ids or ()
        total = len(ids) + request.output_tokens
        if total > max_seq_len:
            raise ConfigError(
                f"Request {request.task_id} has {len(ids)} prompt and {request.output_tokens} output tokens: {total} "
                f"are over max_seq_len, which is {max_seq_len}; shorten it, or raise that where the model allows it.",
                param="dataset",
            )
        if ids and max(ids) >= vocab_size:
            raise ConfigError(
                f"Request {request.task_id} holds the token id {max(ids)}; this model's vocabulary goes from 0 to "
                f"{vocab_size - 1}.",
                param="dataset",
            )


def with_ids(requests: Sequence[BenchRequest], encode: Callable[[str], list[int]]) -> list[BenchRequest]:
    """Text prompts as token ids, so that no measurement holds the time of tokenizing."""
    return [
        request
        if request.input_ids is not None
        else replace(request, input_ids=tuple(encode(request.prompt or "")), prompt=None)
        for request in requests
    ]


def with_text(requests: Sequence[BenchRequest], decode: Callable[[Sequence[int]], str]) -> list[BenchRequest]:
    """Token ids as text, for an API that takes no ids. Encoding it again may give a few tokens more or less."""
    return [
        replace(request, prompt=decode(request.input_ids), input_ids=None) if request.input_ids is not None else request
        for request in requests
    ]


def apart(requests: Sequence[BenchRequest], level: int) -> list[BenchRequest]:
    """The requests of a further level: the same lengths, no prefix in common with another level's.

    A prefix cache compares from the first token on, so that one is changed, the same way everywhere: requests of one
    level that share a prefix still do.
    """
    if level == 0:
        return list(requests)
    pool = sorted({token for request in requests for token in request.input_ids or ()})
    place = {token: index for index, token in enumerate(pool)}

    def change(request: BenchRequest) -> BenchRequest:
        if request.input_ids is None:
            return replace(request, prompt=f"({level}) {request.prompt}")
        first, *rest = request.input_ids
        return replace(request, input_ids=(pool[(place[first] + level) % len(pool)], *rest))

    return [change(request) for request in requests]
