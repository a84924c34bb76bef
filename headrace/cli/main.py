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
from headrace.cli.command import Command, Group
from headrace.cli.commands import COMMANDS, GROUPS
from headrace.envs import is_on
from headrace.errors import HeadraceError, UserError
from headrace.utils.spelling import nearest

NAMED: dict[str, Command | Group] = {
    **{command.name: command for command in COMMANDS},
    **{group.name: group for group in GROUPS},
}


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
    command, rest = _find(words)
    before_dashes = rest[: rest.index("--")] if "--" in rest else rest
    wants_all = any(w in ("--help-all", "--help_all", "--help=all") for w in before_dashes)
    wants_help = wants_all or "-h" in before_dashes or "--help" in before_dashes
    if isinstance(command, Group):
        return _show_group(command, rest, wants_help)
    flags = _load("headrace.cli.flags:Flags")(command)
    if wants_help:
        sys.stdout.write(flags.help(show_all=wants_all))
        return 0
    invocation = flags.parse(rest)
    return int(_load(command.entry)(invocation))


def _find(words: list[str]) -> tuple[Command | Group, list[str]]:
    """The command, or the group of commands, that the words name, and the words that are left.

    A group is no command itself, so flags may stand before the rest of a name in it: `bench --model demo latency`.
    """
    found: Command | Group | None = None
    path: list[str] = []
    rest = list(words)
    while below := _below(path):
        places = [at for at, word in enumerate(rest) if word.replace("_", "-") in below]
        if not places or (places[0] != 0 and not isinstance(found, Group)):
            break
        path.append(rest.pop(places[0]).replace("_", "-"))
        found = NAMED[" ".join(path)]
    if found is None:
        raise _unknown(words[0], _below([]))
    return found, rest


def _below(path: list[str]) -> list[str]:
    """The words that may come next, in order."""
    names = [command.name.split() for command in COMMANDS]
    depth = len(path)
    return list(dict.fromkeys(name[depth] for name in names if name[:depth] == path and len(name) > depth))


def _unknown(word: str, known: list[str]) -> UserError:
    near = nearest(word, known)
    hint = f"the nearest is {near}" if near else f"the commands are {', '.join(known)}"
    return UserError(f"Unknown command {word!r}; {hint}.")


def _show_group(group: Group, rest: list[str], wants_help: bool) -> int:
    if rest and not wants_help:
        word = next((word for word in rest if not word.startswith("-")), rest[0])
        raise _unknown(word, _below(group.name.split()))
    sys.stdout.write(_group_help(group))
    return 0 if wants_help else 2


def _load(entry: str) -> Any:
    module, _, attribute = entry.partition(":")
    return importlib.import_module(module).__dict__[attribute]


def _overview() -> str:
    tops = {name: _summary(name) for name in _below([])}
    width = max(len(name) for name in tops) + 2
    lines = [
        "usage: headrace COMMAND [MODEL] [flags]",
        "",
        "LLM inference on one GPU, or on a CPU.",
        "",
        "commands:",
        *(f"  {name:<{width}}{summary}" for name, summary in tops.items()),
        "",
        "examples:",
        *(f"  {c.example}" for c in COMMANDS if len(c.name.split()) == 1),
        "",
        "headrace COMMAND --help: a command's flags. headrace --version: the version.",
    ]
    return "\n".join(lines) + "\n"


def _summary(name: str) -> str:
    return NAMED[name].summary


def _group_help(group: Group) -> str:
    below = {name: f"{group.name} {name}" for name in _below(group.name.split())}
    width = max(len(name) for name in below) + 2
    # One of each: what lies deeper has a help of its own.
    examples = [next(c.example for c in COMMANDS if f"{c.name} ".startswith(f"{full} ")) for full in below.values()]
    lines = [
        f"usage: headrace {group.name} COMMAND [flags]",
        "",
        f"{group.summary[:1].upper()}{group.summary[1:]}.",
        "",
        "commands:",
        *(f"  {name:<{width}}{_summary(full)}" for name, full in below.items()),
        "",
        "examples:",
        *(f"  {example}" for example in examples),
        "",
        f"headrace {group.name} COMMAND --help: a command's flags.",
    ]
    return "\n".join(lines) + "\n"
