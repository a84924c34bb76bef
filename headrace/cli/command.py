# SPDX-License-Identifier: Apache-2.0
"""What a command is made of, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.cli.alias import Alias

Kind = Literal["text", "int", "float", "flag", "list", "ints"]
"""list: may be repeated; ints: whole numbers, comma-separated or repeated."""


@dataclass(frozen=True, slots=True)
class Option:
    """A flag of a command that is not a setting."""

    name: str
    help: str
    kind: Kind = "text"
    short: str | None = None
    metavar: str = "TEXT"
    default: Any = None
    group: str = ""
    """Heading that it stands under in the help; empty: the command's own."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    """One word, or several: `bench throughput`. A command may have others below it."""
    summary: str
    entry: str
    """`module:function`, called with the `Invocation`; returns the exit code."""
    trees: tuple[str, ...] = ("LlmArgs",)
    """Config classes whose settings are flags of this command."""
    options: tuple[Option, ...] = ()
    arguments: Literal["model", "files", "none"] = "model"
    """What it takes that is not a flag."""
    model_is_optional: bool = False
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Other spellings of its flags, beside those of all commands."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Flags of the like in other programs that mean nothing here, and why: the rest of a sentence that they begin."""
    example: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The words in front of several commands, where they are none themselves."""

    name: str
    summary: str


CONFIG = Option("config", "YAML file of settings", short="-c", metavar="FILE")
LOG_LEVEL = Option("log_level", "debug, info, warning, error or critical (default: warning)", metavar="LEVEL")
