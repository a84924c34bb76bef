# SPDX-License-Identifier: Apache-2.0
"""Validation errors in plain words: one sentence for each field, with the value, its source and what would work."""

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.errors import ConfigError
from headrace.utils.spelling import nearest

NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def explain(error: ValidationError, cls: type[BaseModel], origin: Mapping[str, str] | None = None) -> ConfigError:
    """The `ConfigError` for a failed validation of `cls`. `origin`: dotted path -> where its value came from."""
    sentences: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        for path, sentence in _sentences(detail, cls, origin or {}):
            sentences.setdefault(path, sentence)
    first = next(iter(sentences), "")
    return ConfigError("\n".join(sentences.values()), param=first or None)


def _sentences(detail: Any, cls: type[BaseModel], origin: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    path, owner = field_path(detail["loc"], cls)
    name = ".".join(path)
    kind = detail["type"]
    if kind == "not_yet":
        for key, value in detail["ctx"]["fields"].items():
            full = ".".join((*path, key))
            yield full, f"{full} = {shown(value)}{said(full, origin)} is not supported yet; leave it out."
        return
    if kind == "extra_forbidden":
        yield name, unknown(name, [*path[:-1]], owner, said(name, origin))
        return
    if kind == "missing":
        yield name, f"{name} is missing."
        return
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
        yield name, f"{name}{said(name, origin)}: {reason}" if name else reason
        return
    if not path:
        yield name, f"{cls.__name__} takes a mapping of settings, but got {detail['input']!r}."
        return
    field = owner.model_fields[path[-1]]
    wanted = describe(field.annotation) + _bounds(field.metadata)
    yield name, f"{name} = {shown(detail['input'])}{said(name, origin)} is not valid; it takes {wanted}."


def shown(value: Any) -> str:
    """A value in a message: text without quotes where it can be told from the words around it."""
    text = value if isinstance(value, str) and value and " " not in value else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def said(name: str, origin: Mapping[str, str]) -> str:
    """` (from the environment, HEADRACE_X)`, or nothing where the source is not known."""
    source = origin.get(name)
    return f" (from {source})" if source else ""


def unknown(name: str, parents: list[str], owner: type[BaseModel], source: str = "") -> str:
    """The sentence for a key that does not exist, naming the nearest that does."""
    key = name.split(".")[-1]
    near = nearest(key, owner.model_fields)
    full = ".".join((*parents, near)) if near else ""
    hint = f"; the nearest is {full}." if full else f"; {owner.__name__} has: {', '.join(owner.model_fields)}."
    return f"Unknown setting {name}{source}{hint}"


def field_path(loc: tuple[int | str, ...], cls: type[BaseModel]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """The part of an error's location that names fields (not union branches or list indices), and the last one's class.

    The last name is no field of its class where the error is an unknown key.
    """
    path: list[str] = []
    owner: type[BaseModel] = cls
    inner: type[BaseModel] | None = cls
    for part in loc:
        if inner is None or not isinstance(part, str):
            break
        owner = inner
        path.append(part)
        field = owner.model_fields.get(part)
        inner = _model_in(field.annotation) if field is not None else None
    return tuple(path), owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    branches = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((b for b in branches if isinstance(b, type) and issubclass(b, BaseModel)), None)


def describe(annotation: Any) -> str:
    """A type in words: `auto, or a whole number of at least 1`."""
    kind = get_origin(annotation)
    if kind is Annotated:
        inner, *notes = get_args(annotation)
        return describe(inner) + _bounds(notes)
    if kind is Literal:
        return " or ".join(_joined([str(a) for a in get_args(annotation)]))
    if kind in (Union, types.UnionType):
        branches = [b for b in get_args(annotation) if b is not type(None)]
        words = sorted((describe(b) for b in branches), key=lambda w: w.startswith("a "))
        if type(None) in get_args(annotation):
            words.append("nothing (null)")
        return ", or ".join(words)
    if kind is list or kind is tuple:
        inner = get_args(annotation)
        return f"a list, each {describe(inner[0])}" if inner else "a list"
    return NAMES.get(kind or annotation, "a mapping of settings")


def _joined(words: list[str]) -> list[str]:
    return words if len(words) < 3 else [", ".join(words[:-1]), words[-1]]


def _bounds(notes: list[Any]) -> str:
    parts = [part for note in notes for part in (note.metadata if isinstance(note, FieldInfo) else [note])]
    low = next((f"{part.ge}" for part in parts if isinstance(part, Ge)), None)
    high = next((f"{part.le}" for part in parts if isinstance(part, Le)), None)
    if low is not None and high is not None:
        return f" from {low} to {high}"
    words = [f"of at least {low}"] if low is not None else []
    words += [f"above {part.gt}" for part in parts if isinstance(part, Gt)]
    words += [f"of at most {high}"] if high is not None else []
    words += [f"below {part.lt}" for part in parts if isinstance(part, Lt)]
    return f" {' and '.join(words)}" if words else ""
