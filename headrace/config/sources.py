# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: command line over environment over YAML over defaults, leaf by leaf.

A layer is what one source says. Layers are merged into one nested dict, which the config classes then validate, so a
value is checked the same way wherever it came from, and the message names its source.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from headrace.config.base import Config, Leaf, leaves
from headrace.config.explain import explain, said
from headrace.config.llm_args import LlmArgs
from headrace.config.server import ServerConfig
from headrace.envs import SWITCHES
from headrace.errors import ConfigError
from headrace.utils.lazy import require
from headrace.utils.spelling import nearest

AnyConfig = TypeVar("AnyConfig", bound=Config)

PREFIX = "HEADRACE_"
TREES: tuple[type[Config], ...] = (LlmArgs, ServerConfig)
SECRETS = {leaf.name for tree in TREES for leaf in leaves(tree) if leaf.hint.secret}
# What a container platform sets for a service that happens to be called "headrace".
PLATFORM_VARIABLE = re.compile(r"HEADRACE_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)$")


@dataclass
class Layer:
    """What one source says: nested values, and for each dotted leaf how it was spelled there."""

    source: str
    """command line, environment, or yaml: the word of `ResolvedConfig.origin`."""
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Dotted path -> what to call the source of this value in a message."""

    def put(self, path: Sequence[str], value: Any, spelled: str) -> None:
        """Set the value at a path."""
        at = self.values
        for name in path[:-1]:
            inner = at.get(name)
            if not isinstance(inner, dict):
                inner = at[name] = {}
            at = inner
        at[path[-1]] = value
        self.spelled[".".join(path)] = spelled


@dataclass(frozen=True)
class Settings:
    """The settings of a run, all sources merged."""

    args: LlmArgs
    server: ServerConfig
    origin: dict[str, str]
    """Dotted path -> source, for every setting that was given."""
    overridden: tuple[str, ...]
    """A sentence for each value that a stronger source replaced."""


def load_settings(layers: Sequence[Layer]) -> Settings:
    """Merge layers, the weakest first, and validate. Raises ConfigError with a sentence for each bad value."""
    merged: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    origin: dict[str, str] = {}
    overridden: list[str] = []
    for layer in layers:
        _merge(merged, layer.values, (), layer, spelled, origin, overridden)
    _refuse_unknown(merged, spelled)
    engine = {key: value for key, value in merged.items() if key not in ServerConfig.model_fields}
    server = {key: value for key, value in merged.items() if key in ServerConfig.model_fields}
    errors: list[ConfigError] = []
    args = _build(LlmArgs, engine, spelled, errors)
    served = _build(ServerConfig, server, spelled, errors)
    if args is None or served is None:
        raise ConfigError("\n".join(e.message for e in errors), param=errors[0].param)
    return Settings(args, served, origin, tuple(overridden))


def _build(
    cls: type[AnyConfig], values: dict[str, Any], spelled: Mapping[str, str], errors: list[ConfigError]
) -> AnyConfig | None:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        errors.append(explain(error, cls, spelled))
        return None


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    path: tuple[str, ...],
    layer: Layer,
    spelled: dict[str, str],
    origin: dict[str, str],
    overridden: list[str],
) -> None:
    for key, value in values.items():
        here = (*path, key)
        name = ".".join(here)
        if isinstance(value, Mapping):
            inner = into.get(key)
            if not isinstance(inner, dict):
                inner = into[key] = {}
            spelled.setdefault(name, layer.spelled.get(name, layer.source))
            _merge(inner, value, here, layer, spelled, origin, overridden)
            continue
        new = layer.spelled.get(name, layer.source)
        if isinstance(into.get(key), dict):
            for below in [n for n in origin if n.startswith(name + ".")]:
                del origin[below]
        elif key in into and into[key] != value:
            what = "a value" if name in SECRETS else str(value)
            old = "one" if name in SECRETS else str(into[key])
            overridden.append(f"{name}: {what} from {new} overrides {old} from {spelled[name]}.")
        into[key] = value
        spelled[name] = new
        origin[name] = layer.source


def _refuse_unknown(merged: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
    """Unknown names at the top level: the nearest may be a setting of either tree, or a nested one."""
    sentences: list[str] = []
    first: str | None = None
    for key in merged:
        if any(key in tree.model_fields or key in tree.NOT_YET for tree in TREES):
            continue
        first = first or key
        near = nearest_setting(key)
        hint = f"; the nearest is {near}." if near else "; `headrace serve --help-all` lists every setting."
        sentences.append(f"Unknown setting {key}{said(key, spelled)}{hint}")
    if sentences:
        raise ConfigError("\n".join(sentences), param=first)


def every_leaf(groups: bool = False) -> dict[str, Leaf]:
    """Every setting of every tree by dotted name."""
    return {leaf.name: leaf for tree in TREES for leaf in leaves(tree, groups=groups)}


def nearest_setting(name: str) -> str | None:
    """The setting most like a name: one whose last part it is, else the most similar."""
    known = list(every_leaf(groups=True))
    last = name.rsplit(".", 1)[-1]
    for full in known:
        if full.rsplit(".", 1)[-1] == last:
            return full
    return nearest(name, known) or nearest(last, known)


def parse_text(text: str, leaf: Leaf) -> Any:
    """A value as written on a command line or in a variable. Numbers and booleans stay text, for the field to read."""
    annotation = leaf.field.annotation
    options = get_args(annotation)
    if text.strip().lower() in ("none", "null") and type(None) in options:
        return None
    if leaf.group is not None or _is_structured(annotation) or (text[:1] in "[{" and _holds_a_list(annotation)):
        return parse_yaml(text, f"the value of {leaf.name}")
    if _holds_a_list(annotation):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _holds_a_list(annotation: Any) -> bool:
    return any(get_origin(a) in (list, tuple) for a in (annotation, *get_args(annotation)))


def _is_structured(annotation: Any) -> bool:
    return any(get_origin(a) is dict for a in (annotation, *get_args(annotation)))


def parse_yaml(text: str, where: str) -> Any:
    """YAML text, safely loaded. Raises ConfigError naming where it stood."""
    yaml = require("yaml", purpose="A YAML setting")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}.") from None


def yaml_layer(path: str) -> Layer:
    """The settings of a YAML file (JSON is YAML too)."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"config file {path} cannot be read: {reason}.", param="config") from None
    values = parse_yaml(text, f"config file {path}")
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"config file {path} must hold settings, one `name: value` a line.", param="config")
    layer = Layer("yaml", values)
    _name_leaves(values, (), path, layer)
    return layer


def _name_leaves(values: Mapping[str, Any], path: tuple[str, ...], file: str, layer: Layer) -> None:
    for key, value in values.items():
        here = (*path, str(key))
        layer.spelled[".".join(here)] = file
        if isinstance(value, Mapping):
            _name_leaves(value, here, file, layer)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Settings from HEADRACE_NAME, a nested one from HEADRACE_GROUP__NAME. Raises ConfigError for any other."""
    known = {PREFIX + name.replace(".", "__").upper(): leaf for name, leaf in every_leaf(groups=True).items()}
    layer = Layer("environment")
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in SWITCHES:
            continue
        leaf = known.get(variable)
        if PLATFORM_VARIABLE.match(variable) and (leaf is None or "://" in text):
            continue
        if leaf is None:
            near = nearest(variable, [*known, *SWITCHES])
            hint = f"; the nearest is {near}." if near else "."
            raise ConfigError(f"Unknown environment variable {variable}{hint}")
        layer.put(leaf.path, parse_text(text, leaf), variable)
    return layer
