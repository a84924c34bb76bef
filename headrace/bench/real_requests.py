# SPDX-License-Identifier: Apache-2.0
"""Real requests -> a dataset: the lines that logs, batch files and chat collections are made of.

A line is a JSON object with `messages` (or an OpenAI batch line with them under `body`), `conversations` of
`{"from", "value"}`, or `prompt`. Output tokens are what the line asks for (`max_tokens`, `max_completion_tokens`,
`output_tokens`), else the length of the answer that it holds, else a default.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.dataset import BenchRequest
from headrace.errors import ConfigError

LIMITS = ("output_tokens", "max_completion_tokens", "max_tokens", "max_output_tokens")
ANSWERS = ("completion", "response", "output", "answer")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Names of speakers in chat collections -> roles."""


class Encoder(Protocol):
    """What is asked of a tokenizer: `headrace.engine.tokenizer.Tokenizer` has it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


def read_real_requests(
    path: str, tokenizer: Encoder, default_output: int | None, count: int | None = None
) -> list[BenchRequest]:
    """The requests of a file of real ones, as token ids.

    Raises:
        ConfigError: the file or a line of it cannot be used; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"input {path} cannot be read: {reason}.", param="input") from None
    requests: list[BenchRequest] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and (count is None or len(requests) < count):
            requests.append(_parse(line, f"input {path}, line {number}", len(requests), tokenizer, default_output))
    if not requests:
        raise ConfigError(f"input {path} holds no request.", param="input")
    return requests


def _parse(line: str, where: str, index: int, tokenizer: Encoder, default_output: int | None) -> BenchRequest:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.", param="input") from None
    if isinstance(values, dict) and isinstance(values.get("body"), dict):
        values = values["body"]
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a JSON object with messages, conversations or prompt.", param="input")
    ids, answer = _prompt(values, where, tokenizer)
    if not ids:
        raise ConfigError(f"{where} has no tokens: its prompt is empty.", param="input")
    limit = next((values[name] for name in LIMITS if type(values.get(name)) is int), None)
    if limit is None and answer:
        limit = len(tokenizer.encode(answer, False))
    limit = limit or default_output
    if limit is None:
        raise ConfigError(
            f"{where} does not say how many tokens to make: give it max_tokens, or all such lines --output_mean.",
            param="input",
        )
    return BenchRequest(index, max(1, limit), tuple(ids))


def _prompt(values: Mapping[str, Any], where: str, tokenizer: Encoder) -> tuple[list[int], str | None]:
    """The prompt's ids, and the text that answered it, where the line has that."""
    answer = next((values[name] for name in ANSWERS if isinstance(values.get(name), str)), None)
    prompt = values.get("prompt")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), answer
    turns = values.get("messages") or values.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where} has neither messages, nor conversations, nor a prompt.", param="input")
    messages = [_message(turn, where) for turn in turns]
    # What the assistant said last is the answer, unless somebody spoke after it.
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = answer or last["content"]
    if not messages:
        return [], answer
    return tokenizer.render_chat(messages), answer


def _message(turn: Mapping[str, Any], where: str) -> dict[str, str]:
    role, content = turn.get("role") or turn.get("from"), turn.get("content", turn.get("value"))
    if isinstance(content, list):
        # Parts: only their text reaches a model of text.
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(f"{where} has a message without a role or without text.", param="input")
    return {"role": ROLES.get(role, role), "content": content}
