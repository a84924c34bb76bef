# SPDX-License-Identifier: Apache-2.0
"""`headrace chat`: an interactive, streaming chat with a model loaded here, or with any OpenAI server."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from headrace.cli.flags import Invocation
from headrace.cli.generate import report, write
from headrace.cli.local import Answer, LocalModel, Message
from headrace.cli.remote import RemoteModel
from headrace.cli.sampling import given_sampling, sampling_params
from headrace.cli.settings import log_settings, read_settings, set_log_level
from headrace.errors import EngineDeadError, HeadraceError, RequestError, UserError
from headrace.utils.lazy import require

HELP = """\
/reset   forget what was said
/system TEXT   set the system message, and start afresh
/exit    leave (so does Ctrl-D)
/help    this
Ctrl-C stops the answer.
"""


def run(invocation: Invocation) -> int:
    """Chat until the user leaves; returns the exit code."""
    options = invocation.options
    set_log_level(options["log_level"])
    if options["url"]:
        if invocation.model is not None:
            raise UserError(
                "Give a MODEL to load or a --url to talk to, not both; --model names the server's.", param="url"
            )
        sampling_params(options)
        key = options["api_key"] or os.environ.get("OPENAI_API_KEY")
        with RemoteModel(options["url"], options["model"], key) as remote:
            settings = given_sampling(options)
            return Chat(remote.name, lambda m: remote.chat(m, settings, write), options["system"]).run()
    return _run_local(invocation, options)


def _run_local(invocation: Invocation, options: dict[str, Any]) -> int:
    for name in ("model", "api_key"):
        if options[name]:
            raise UserError(f"--{name} goes with --url; a model to load is named without a flag.", param=name)
    settings = read_settings(invocation)
    log_settings(invocation, settings)
    params = sampling_params(options)
    with LocalModel(settings.args) as model:
        if not model.has_chat_template:
            raise UserError(
                f"{model.name} has no chat template: give --chat_template FILE, or use `headrace generate --raw`.",
                param="chat_template",
            )
        return Chat(model.name, lambda m: model.chat(m, params, write), options["system"]).run()


class Chat:
    """The conversation and its loop. `answer` takes the messages and writes the answer as it comes."""

    def __init__(self, name: str, answer: Callable[[list[Message]], Answer], system: str | None) -> None:
        self._name = name
        self._answer = answer
        self._system = system
        self.messages: list[Message] = []
        self._is_terminal = sys.stdin.isatty()
        self.has_failed = False
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def run(self) -> int:
        """Read lines until the end of input or /exit."""
        if self._is_terminal:
            # Importing it gives input() line editing and history.
            require("readline")
            sys.stderr.write(f"{self._name}. /help lists the commands.\n")
        while True:
            try:
                line = input("> " if self._is_terminal else "")
            except EOFError:
                write("\n" if self._is_terminal else "")
                # A script that pipes its lines in must learn that one of them failed.
                return int(self.has_failed and not self._is_terminal)
            except KeyboardInterrupt:
                sys.stderr.write("\nCtrl-D or /exit leaves.\n")
                continue
            if line.startswith("/"):
                if self._command(line.strip()):
                    return 0
            elif line.strip():
                self.say(line)

    def say(self, text: str) -> None:
        """One turn. A turn that fails, or is stopped before its first word, is taken back."""
        begin = time.perf_counter()
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer(list(self.messages))
        except EngineDeadError:
            raise
        except HeadraceError as error:
            self.messages.pop()
            more = " /reset starts afresh." if isinstance(error, RequestError) and len(self.messages) > 1 else ""
            sys.stderr.write(f"{error.message}{more}\n")
            self.has_failed = True
            return
        write("\n")
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        if answer.was_stopped:
            sys.stderr.write("[stopped]\n")
        report(answer, time.perf_counter() - begin)

    def _command(self, line: str) -> bool:
        """Carry out a /command; True is to leave."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return True
        if word == "/reset":
            self.reset()
            sys.stderr.write("Forgotten.\n")
        elif word == "/system":
            self._system = rest.strip() or None
            self.reset()
            sys.stderr.write("Set; the chat starts afresh.\n")
        elif word == "/help":
            sys.stderr.write(HELP)
        else:
            sys.stderr.write(f"Unknown command {word}; /help lists them.\n")
        return False
