# SPDX-License-Identifier: Apache-2.0
"""`headrace COMMAND ...`: finds the command, and turns errors into one sentence and an exit code.

Exit codes: 0 done; 1 the engine or the server failed; 2 something the user gave is wrong; 130 stopped by Ctrl-C.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from headrace import __version__
from headrace.cli.commands import COMMANDS, Command
from headrace.envs import is_on
from headrace.errors import HeadraceError, UserError
from headrace.utils.spelling import nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process, by default) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except HeadraceError as error:
        if is_on("HEADRACE_TRACEBACK"):
            raise
        for line in error.message.splitlines():
            sys.stderr.write(f"headrace: {line}\n")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone; keep the interpreter from complaining when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "--help-all", "--help_all", "help"):
        sys.stdout.write(_overview())
        return 0 if words else 2
    if first in ("-V", "--version", "version"):
        sys.stdout.write(f"headrace {__version__}\n")
        return 0
    command = _find(first)
    flags = _load("headrace.cli.flags:Flags")(command)
    before_dashes = words[1 : words.index("--")] if "--" in words else words[1:]
    wants_all = any(w in ("--help-all", "--help_all", "--help=all") for w in before_dashes)
    if wants_all or "-h" in before_dashes or "--help" in before_dashes:
        sys.stdout.write(flags.help(show_all=wants_all))
        return 0
    invocation = flags.parse(words[1:])
    return int(_load(command.entry)(invocation))


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    near = nearest(name, [c.name for c in COMMANDS])
    hint = f"the nearest is {near}" if near else f"the commands are {', '.join(c.name for c in COMMANDS)}"
    raise UserError(f"Unknown command {name!r}; {hint}.")


def _load(entry: str) -> Any:
    module, _, attribute = entry.partition(":")
    return importlib.import_module(module).__dict__[attribute]


def _overview() -> str:
    width = max(len(c.name) for c in COMMANDS) + 2
    lines = [
        "usage: headrace COMMAND [MODEL] [flags]",
        "",
        "LLM inference on one GPU, or on a CPU.",
        "",
        "commands:",
        *(f"  {c.name:<{width}}{c.summary}" for c in COMMANDS),
        "",
        "examples:",
        *(f"  {c.example}" for c in COMMANDS),
        "",
        "headrace COMMAND --help: a command's flags. headrace --version: the version.",
    ]
    return "\n".join(lines) + "\n"
