# SPDX-License-Identifier: Apache-2.0
"""Real requests in the shapes that logs and collections have them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.real_requests import read_real_requests
from headrace.errors import ConfigError


class Bytes:
    """Bytes are tokens; a chat is its roles and texts."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return list("".join(f"[{m['role']}]{m['content']}" for m in messages).encode())


def read(folder: Path, *lines: object, default: int | None = None, count: int | None = None) -> list[tuple[str, int]]:
    path = folder / "real.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    requests = read_real_requests(str(path), Bytes(), default, count)
    return [(bytes(request.input_ids or ()).decode(), request.output_tokens) for request in requests]


@pytest.mark.parametrize(
    ("line", "prompt", "output"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}, "[user]Hi", 5),
        ({"body": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 6}}, "[user]Hi", 6),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 1}, "[user]Hi", 1),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
            "[user]Hi",
            5,
        ),
        (
            {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "Bcd"}]},
            "[user]A",
            3,
        ),
        ({"prompt": "Once", "completion": "upon"}, "\x01Once", 4),
        ({"prompt": "Once", "output_tokens": 7}, "\x01Once", 7),
        ({"prompt": "Once"}, "\x01Once", 9),
    ],
)
def test_a_line_gives_its_prompt_and_its_length(line: object, prompt: str, output: int, tmp_path: Path) -> None:
    assert read(tmp_path, line, default=9) == [(prompt, output)]


def test_only_the_first_are_taken(tmp_path: Path) -> None:
    assert len(read(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}, "broken", default=1, count=2)) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "x"}, "line 1 does not say how many tokens to make: give it max_tokens"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 1 has no tokens"),
        ({"messages": [{"content": "x"}]}, "line 1 has a message without a role or without text"),
        ({"text": "x"}, "line 1 has neither messages, nor conversations, nor a prompt"),
        ("{", "line 1 is not JSON"),
        ([1], "line 1 must be a JSON object"),
        ("", "real.jsonl holds no request"),
    ],
)
def test_a_bad_line_is_one_sentence(line: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, line)
