# SPDX-License-Identifier: Apache-2.0
"""`headrace generate` says where it does something else than answer."""

import pytest

from headrace.cli import generate
from headrace.cli.commands import COMMANDS
from headrace.cli.flags import Flags
from headrace.cli.local import Answer


class ModelWithoutTemplate:
    name = "base"
    has_chat_template = False

    def __init__(self, args: object) -> None:
        pass

    def __enter__(self) -> "ModelWithoutTemplate":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def answer(self, prompt: str, params: object, write: object) -> Answer:
        return Answer(prompt, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [([], "headrace: base has no chat template: the prompt is continued as plain text.\n"), (["--raw"], "")],
)
def test_a_prompt_that_is_continued_for_want_of_a_template_is_said_to_be(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "LocalModel", ModelWithoutTemplate)
    monkeypatch.setattr(generate, "set_log_level", lambda level: None)
    command = next(command for command in COMMANDS if command.name == "generate")
    invocation = Flags(command).parse(["base", "--prompt", "x", *flags])
    assert generate.run(invocation) == 0
    assert capsys.readouterr().err == said
