# SPDX-License-Identifier: Apache-2.0
"""The base of every setting: frozen, unknown keys refused, the docstring under a field is its help."""

import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from headrace.config.explain import explain

Stability = Literal["stable", "beta", "prototype"]


@dataclass(frozen=True, slots=True)
class Hint:
    """What a field says about itself beyond its type; written as `Annotated[int, Hint(...)]`."""

    common: bool = False
    """Shown by the short `--help`."""
    status: Stability = "stable"
    secret: bool = False
    """Never printed."""


Common = Hint(common=True)
Beta = Hint(status="beta")
Prototype = Hint(status="prototype")
PLAIN = Hint()

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Config(BaseModel):
    """A group of settings. Constructing one with a bad value raises `ConfigError`, one sentence for each bad field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    NOT_YET: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known settings without an implementation here, each with the values that ask for nothing and so are accepted."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    # Without this mark, nested validation would come through __init__ and lose the path of the field at fault.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # Null where it is no value of its own means what leaving the setting out means.
        data = {
            key: value for key, value in data.items() if value is not None or _takes_none(cls.model_fields.get(key))
        }
        named = {key: value for key, value in data.items() if key in cls.NOT_YET}
        asked = {key: value for key, value in named.items() if value is not None and value not in cls.NOT_YET[key]}
        if asked:
            raise PydanticCustomError("not_yet", "not supported yet", {"fields": asked})
        return {key: value for key, value in data.items() if key not in named}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting at the end of a path such as `kv_cache_config.dtype`, or a nested group as a whole."""

    path: tuple[str, ...]
    owner: type[Config]
    """The class whose body declares the field."""
    field: FieldInfo
    group: type[Config] | None = None
    """The nested class, where the setting is a group as a whole."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def hint(self) -> Hint:
        return next((m for m in self.field.metadata if isinstance(m, Hint)), PLAIN)


def _takes_none(field: FieldInfo | None) -> bool:
    return field is None or field.annotation is None or type(None) in get_args(field.annotation)


def nested(annotation: Any) -> type[Config] | None:
    """The Config class inside `SomeConfig`, `SomeConfig | None`; None where there is none."""
    kind = get_origin(annotation)
    candidates = get_args(annotation) if kind in (Union, types.UnionType) else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


def owner_of(cls: type[Config], name: str) -> type[Config]:
    """The class in the bases of `cls` whose body declares a field."""
    for base in reversed(cls.__mro__):
        if issubclass(base, Config) and name in inspect.get_annotations(base):
            return base
    return cls


def leaves(cls: type[Config], prefix: tuple[str, ...] = (), groups: bool = False) -> Iterator[Leaf]:
    """Every setting of a tree in order; with `groups`, a nested group also as a whole, before its fields."""
    for name, field in cls.model_fields.items():
        path = (*prefix, name)
        inner = nested(field.annotation)
        if inner is None:
            yield Leaf(path, owner_of(cls, name), field)
            continue
        if groups:
            yield Leaf(path, owner_of(cls, name), field, inner)
        yield from leaves(inner, path, groups)


def value_of(config: Config, path: tuple[str, ...]) -> Any:
    """The value at the end of a path; None below a nested group that is off."""
    value: Any = config
    for name in path:
        if value is None:
            return None
        value = value.__dict__[name]
    return value
