# SPDX-License-Identifier: Apache-2.0
"""`headrace generate MODEL --prompt TEXT`: one answer, streamed to the terminal."""

import sys
import time

from headrace.cli.flags import Invocation
from headrace.cli.local import Answer, LocalModel
from headrace.cli.sampling import sampling_params
from headrace.cli.settings import log_settings, read_settings, set_log_level
from headrace.errors import UserError


def run(invocation: Invocation) -> int:
    """Answer and return the exit code: 130 where Ctrl-C cut the answer short."""
    options = invocation.options
    set_log_level(options["log_level"])
    settings = read_settings(invocation)
    log_settings(invocation, settings)
    params = sampling_params(options)
    if options["raw"] and options["system"]:
        raise UserError("--system has no place in a raw prompt; leave out --system or --raw.", param="system")
    prompt = _prompt(options["prompt"])
    with LocalModel(settings.args) as model:
        if options["system"] and not model.has_chat_template:
            raise UserError(
                f"--system needs a chat template, and {model.name} has none: leave it out or give --chat_template.",
                param="system",
            )
        if not options["raw"] and not model.has_chat_template:
            sys.stderr.write(f"headrace: {model.name} has no chat template: the prompt is continued as plain text.\n")
        begin = time.perf_counter()
        if options["raw"] or not model.has_chat_template:
            answer = model.answer(prompt, params, write)
        else:
            answer = model.chat(as_messages(prompt, options["system"]), params, write)
        write("\n")
        report(answer, time.perf_counter() - begin)
    return 130 if answer.was_stopped else 0


def as_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one question."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def write(text: str) -> None:
    """To the terminal, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def report(answer: Answer, seconds: float) -> None:
    """How much and how fast, where a person is watching."""
    if sys.stderr.isatty() and answer.num_output_tokens:
        rate = answer.num_output_tokens / seconds
        sys.stderr.write(
            f"[{answer.num_prompt_tokens} prompt + {answer.num_output_tokens} output tokens, {rate:.1f} tokens/s]\n"
        )


def _prompt(text: str | None) -> str:
    if text is None and sys.stdin.isatty():
        raise UserError(
            'generate needs a prompt: --prompt "TEXT", or --prompt - to read standard input.', param="prompt"
        )
    if text is None or text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise UserError("The prompt is empty; give some text.", param="prompt")
    return text
