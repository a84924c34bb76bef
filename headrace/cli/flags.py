# SPDX-License-Identifier: Apache-2.0
"""A command's flags, generated from the config tree: argv -> `Invocation`, and the grouped help."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args, get_origin

from headrace.cli.alias import ALIASES, SILENT
from headrace.cli.command import Command, Option
from headrace.config.base import Config, Leaf, leaves
from headrace.config.llm_args import LlmArgs
from headrace.config.server import ServerConfig
from headrace.config.sources import Layer, every_leaf, parse_text, parse_yaml
from headrace.errors import ConfigError
from headrace.utils.spelling import nearest

TREES: dict[str, type[Config]] = {"LlmArgs": LlmArgs, "ServerConfig": ServerConfig}
TRUE = {"true", "1", "yes", "on"}
FALSE = {"false", "0", "no", "off"}
MODEL_HELP = "A Hugging Face folder, a .gguf file, a Hub id, or `demo`"
FILES_HELP = "A file, one or more"


@dataclass
class Invocation:
    """A parsed command line."""

    command: Command
    model: str | None
    options: dict[str, Any]
    """The command's own options, by name; a default where one was not given."""
    layer: Layer
    """The settings that the command line gives."""
    became: list[str] = field(default_factory=list)
    """A sentence for each alias that was used."""
    files: list[str] = field(default_factory=list)
    """What a command takes that works on files."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see `{self.prog} --help`.")


@dataclass(frozen=True)
class _Flag:
    """One flag of a command: a setting, or an option."""

    name: str
    leaf: Leaf | None = None
    option: Option | None = None

    @property
    def is_boolean(self) -> bool:
        if self.option is not None:
            return self.option.kind == "flag"
        return self.leaf is not None and self.leaf.field.annotation is bool


class Flags:
    """The flags of one command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.flags: dict[str, _Flag] = {option.name: _Flag(option.name, option=option) for option in command.options}
        self.shorts = {option.short: option.name for option in command.options if option.short}
        if command.arguments == "model":
            self.shorts["-m"] = "model"
        for tree in command.trees:
            for leaf in leaves(TREES[tree], groups=True):
                if leaf.name != "model":
                    self.flags.setdefault(leaf.name, _Flag(leaf.name, leaf=leaf))

    def parse(self, argv: Sequence[str]) -> Invocation:
        """Read a command line. Raises ConfigError, one sentence, for a flag that is unknown or lacks its value."""
        layer = Layer("command line")
        became: list[str] = []
        plain = self._normalize(argv, layer, became)
        parser = self._parser(show_all=True)
        given = vars(parser.parse_args(plain))
        options = {o.name: o.default for o in self.command.options}
        for name, text in given.items():
            flag = self.flags.get(name)
            if flag is None or text is None:
                continue
            if flag.option is not None:
                options[name] = _option_value(flag.option, text)
            elif flag.leaf is not None:
                values = [parse_text(t, flag.leaf) for t in text]
                several = [v for value in values for v in (value if isinstance(value, list) else [value])]
                value = several if isinstance(values[-1], list) else values[-1]
                layer.put(flag.leaf.path, value, layer.spelled.get(name, f"--{name}"))
        model = given.get("MODEL")
        if model is not None:
            layer.put(("model",), model, "the command line")
        return Invocation(self.command, model, options, layer, became, given.get("FILE") or [])

    def _normalize(self, argv: Sequence[str], layer: Layer, became: list[str]) -> list[str]:
        """Every flag as `--name=value` under its own name; what is not a flag, as it is."""
        out: list[str] = []
        rest = list(argv)
        while rest:
            token = rest.pop(0)
            if token == "--":
                return [*out, "--", *rest]
            if token in self.shorts:
                token = f"--{self.shorts[token]}"
            if not token.startswith("--"):
                if token.startswith("-") and len(token) > 1:
                    raise ConfigError(f"Unknown flag {token}; see `headrace {self.command.name} --help`.")
                out.append(token)
                continue
            spelled, has_value, value = token.partition("=")
            out += self._one(spelled, value if has_value else None, rest, layer, became)
        return out

    def _one(self, spelled: str, value: str | None, rest: list[str], layer: Layer, became: list[str]) -> list[str]:
        """One flag, with its value taken from `rest` where it needs one."""
        name = spelled[2:].replace("-", "_")
        negated = False
        if name not in self.flags and name not in ALIASES and name.startswith("no_"):
            name, negated = name[3:], True
        if name == "model" and name not in self.flags and self.command.arguments == "model":
            return [_take(spelled, value, rest)]
        if name in self.command.refused:
            raise ConfigError(f"Flag {spelled} {self.command.refused[name]}")
        alias = (self.command.aliases.get(name) or ALIASES.get(name)) if name not in self.flags else None
        if alias and alias.values is not None:
            converted = _converted(spelled, alias.values, _take(spelled, value, rest))
            if converted is None:
                return []
            value = converted
        target = alias.target if alias else name
        flag = self.flags.get(target)
        if flag is None and alias is not None:
            # It takes no value and asks for what is so anyway.
            became.append(f"{spelled} has no effect ({alias.note}).")
            return []
        if flag is None:
            return self._foreign(spelled, name, value, rest, layer)
        if alias and alias.value is not None:
            text = alias.value
        elif flag.is_boolean:
            text = _boolean(spelled, value, rest, negated != (alias is not None and alias.inverts))
        elif negated:
            raise ConfigError(f"Flag {spelled} makes no sense: {target} is not true or false.")
        else:
            text = _take(spelled, value, rest)
        if alias and name not in SILENT:
            note = f" ({alias.note})" if alias.note else ""
            became.append(f"{spelled} is taken as --{target} {text}{note}.")
        layer.spelled[target] = spelled
        return [f"--{target}={text}"]

    def _foreign(self, spelled: str, name: str, value: str | None, rest: list[str], layer: Layer) -> list[str]:
        """A flag that is none of ours: known but not built (its value decides), or unknown."""
        if any(name in TREES[tree].NOT_YET for tree in self.command.trees):
            text = value if value is not None else rest.pop(0) if rest and not rest[0].startswith("-") else "true"
            layer.put((name,), parse_yaml(text, f"the value of {spelled}"), spelled)
            return []
        near = nearest(name, [*self.flags, *self.command.aliases, *ALIASES])
        if near is None or name in every_leaf():
            last = name.rsplit(".", 1)[-1]
            near = next((full for full in self.flags if full.rsplit(".", 1)[-1] == last), near)
        hint = f"the nearest is --{near}" if near else f"`headrace {self.command.name} --help-all` lists every flag"
        raise ConfigError(f"Unknown flag {spelled}; {hint}.")

    def help(self, show_all: bool) -> str:
        """The help text."""
        return self._parser(show_all).format_help()

    def _parser(self, show_all: bool) -> _Parser:
        command = self.command
        hidden = sum(1 for f in self.flags.values() if f.leaf is not None and not _is_shown(f.leaf, False))
        parser = _Parser(
            prog=f"headrace {command.name}",
            usage=f"headrace {command.name} {_arguments(command)}[flags]",
            description=f"{command.summary[:1].upper()}{command.summary[1:]}.",
            epilog=_epilog(command, 0 if show_all else hidden),
            formatter_class=_formatter,
            add_help=False,
            allow_abbrev=False,
        )
        if command.arguments == "model":
            parser.add_argument("MODEL", nargs="?", help=MODEL_HELP)
        elif command.arguments == "files":
            parser.add_argument("FILE", nargs="*", help=FILES_HELP)
        own = parser.add_argument_group(command.name)
        groups: dict[str, argparse._ArgumentGroup] = {}
        for option in command.options:
            _add_option(
                groups.setdefault(option.group, parser.add_argument_group(option.group)) if option.group else own,
                option,
            )
        own.add_argument("-h", "--help", action="store_true", help="The usual flags; --help-all: every flag")
        for flag in self.flags.values():
            if flag.leaf is None:
                continue
            title = (flag.leaf.owner.__doc__ or "").strip()
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            text = _leaf_help(flag.leaf) if _is_shown(flag.leaf, show_all) else argparse.SUPPRESS
            metavar = _metavar(flag.leaf)
            groups[title].add_argument(f"--{flag.name}", dest=flag.name, action="append", metavar=metavar, help=text)
        return parser


def _arguments(command: Command) -> str:
    """What the usage line shows between the command and its flags."""
    if command.arguments == "model":
        return "[MODEL] " if command.model_is_optional else "MODEL "
    return "FILE ... " if command.arguments == "files" else ""


def _add_option(group: "argparse._ArgumentGroup", option: Option) -> None:
    names = [f"--{option.name}"] if option.short is None else [option.short, f"--{option.name}"]
    shown = f"{option.help[:1].upper()}{option.help[1:]}".replace("%", "%%")
    metavar = "" if option.kind == "flag" else option.metavar
    group.add_argument(*names, dest=option.name, action="append", metavar=metavar, help=shown)


def _is_shown(leaf: Leaf, show_all: bool) -> bool:
    return show_all or leaf.hint.common


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(110, shutil.get_terminal_size((100, 24)).columns - 2)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


def _epilog(command: Command, hidden: int) -> str:
    more = f"{hidden} more flags: headrace {command.name} --help-all. " if hidden else ""
    settings = (
        "Any setting may also stand in a YAML file (--config) or in the environment as HEADRACE_NAME, a nested one as "
        "HEADRACE_GROUP__NAME; a flag wins over the environment, and that over the file. "
        if command.trees
        else ""
    )
    return (
        f"{more}A flag that is true or false is on by its name alone and off as --no_NAME. Underscores and dashes are "
        f"the same. {settings}Example: {command.example}"
    )


def _leaf_help(leaf: Leaf) -> str:
    text = " ".join((leaf.field.description or "").split()).rstrip(".")
    status = "" if leaf.hint.status == "stable" else f" [{leaf.hint.status}]"
    if leaf.group is not None:
        return f"{text}{status} (the whole group as YAML)".replace("%", "%%")
    default = leaf.field.default
    shown = (
        "none" if default is None or default == () else str(default).lower() if isinstance(default, bool) else default
    )
    return f"{text}{status} (default: {shown})".replace("%", "%%")


def _metavar(leaf: Leaf) -> str:
    annotation = leaf.field.annotation
    kinds = [annotation, *get_args(annotation)]
    choices = [str(c) for k in kinds if get_origin(k) is Literal for c in get_args(k)]
    if get_origin(annotation) is Literal:
        return "{" + ",".join(choices) + "}"
    words = [_word(k) for k in (get_args(annotation) or [annotation])]
    return "|".join(dict.fromkeys([*(w for w in words if w), *choices])) or "YAML"


def _word(kind: Any) -> str:
    base = get_args(kind)[0] if get_origin(kind) not in (None, Literal, list, tuple, dict) and get_args(kind) else kind
    return {int: "N", float: "X", str: "TEXT", bool: "BOOL"}.get(
        base, "LIST" if get_origin(kind) in (list, tuple) else ""
    )


def _take(spelled: str, value: str | None, rest: list[str]) -> str:
    if value is not None:
        return value
    if not rest:
        raise ConfigError(f"Flag {spelled} needs a value.")
    return rest.pop(0)


def _converted(spelled: str, values: Mapping[str, str | None], text: str) -> str | None:
    """What a value of an alias becomes. ConfigError for one that it cannot have."""
    if text.lower() not in values:
        raise ConfigError(f"Flag {spelled} takes {' or '.join(values)} here, but got {text!r}.")
    return values[text.lower()]


def _boolean(spelled: str, value: str | None, rest: list[str], negated: bool) -> str:
    if value is None and rest and rest[0].lower() in TRUE | FALSE:
        value = rest.pop(0)
    word = "true" if value is None else value.lower()
    if word not in TRUE | FALSE:
        raise ConfigError(f"Flag {spelled} takes true or false, but got {value!r}.")
    return "true" if (word in TRUE) != negated else "false"


def _option_value(option: Option, texts: list[str]) -> Any:
    if option.kind == "list":
        return texts
    if option.kind == "ints":
        parts = [part.strip() for text in texts for part in text.split(",")]
        return [_number(option, part) for part in parts]
    text = texts[-1]
    if option.kind == "flag":
        return text == "true"
    if option.kind == "text":
        return text
    return _number(option, text)


def _number(option: Option, text: str) -> int | float:
    try:
        return float(text) if option.kind == "float" else int(text)
    except ValueError:
        wanted = {"int": "a whole number", "ints": "whole numbers (1,8,64)"}.get(option.kind, "a number")
        raise ConfigError(f"Flag --{option.name} takes {wanted}, but got {text!r}.") from None
