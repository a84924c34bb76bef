# SPDX-License-Identifier: Apache-2.0
"""`KvCacheRetentionConfig`: how long a request's KV should stay in the prefix cache."""

from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from headrace.errors import RequestError
from headrace.utils.spelling import nearest

NAME = "kv_cache_retention_config"
"""The argument and request field that holds one."""
HIGHEST_PRIORITY = 100
LONGEST_MS = 2**53
DEFAULT_PRIORITY = 35
"""Of blocks for which nobody asks for another."""

# Known fields without an implementation, each with the values that ask for nothing (None always does).
NOT_YET: dict[str, tuple[Any, ...]] = {"transfer_mode": ("DRAM",), "directory": ("",)}

WORDS = {"int_type": "a whole number", "list_type": "a list", "model_type": "a mapping of its fields"}


def _whole_ms(value: Any) -> Any:
    """A `timedelta`, as TensorRT-LLM's own class takes it, in milliseconds."""
    return round(value / timedelta(milliseconds=1)) if isinstance(value, timedelta) else value


Milliseconds = Annotated[int, BeforeValidator(_whole_ms)]


class _Retention(BaseModel):
    """A bad value is a `RequestError`; inside a request's body, a complaint that names the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)

    def __init__(self, *values: Any, **data: Any) -> None:
        """`values`: of the fields in their order, as in TensorRT-LLM's examples."""
        if len(values) > len(type(self).model_fields):
            raise TypeError(f"{type(self).__name__} takes {len(type(self).model_fields)} values, not {len(values)}")
        data = {**dict(zip(type(self).model_fields, values, strict=False)), **data}
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _explain(error, type(self)) from None

    # Without this mark, nested validation would come through __init__ and lose the path of the field at fault.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_built(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # An explicit null means what leaving the field out means.
        data = {name: value for name, value in data.items() if value is not None}
        for name in NOT_YET.keys() & data.keys() - cls.model_fields.keys():
            if data[name] not in NOT_YET[name]:
                raise ValueError(f"{name} = {data[name]!r} is not supported yet; leave it out.")
            del data[name]
        return data


class KvCacheRetentionConfig(_Retention):
    """How long the blocks of one request's KV should stay cached. Frozen.

    A block belongs to the range that its first token is in. Blocks in no range have priority 35.
    """

    class TokenRangeRetentionConfig(_Retention):
        """A range of the prompt."""

        token_start: int
        """First token, counted from 0."""
        token_end: int | None = None
        """End, exclusive; None: the prompt's."""
        priority: int
        """0 (evicted first) to 100 (last)."""
        duration_ms: Milliseconds | None = None
        """How long the priority holds; then it is 35. None: for ever. A `timedelta` is taken too."""

        @model_validator(mode="after")
        def _check(self) -> "KvCacheRetentionConfig.TokenRangeRetentionConfig":
            if self.token_start < 0:
                raise ValueError(f"token_start must be 0 or more, but is {self.token_start}.")
            if self.token_end is not None and self.token_end <= self.token_start:
                raise ValueError(f"token_end ({self.token_end}) must be above token_start ({self.token_start}).")
            _check_priority("priority", self.priority)
            _check_duration("duration_ms", self.duration_ms)
            return self

    token_range_retention_configs: list[TokenRangeRetentionConfig] = []
    """Ranges of the prompt, in any order, without overlaps."""
    decode_retention_priority: int = DEFAULT_PRIORITY
    """Of blocks that begin in the output."""
    decode_duration_ms: Milliseconds | None = None
    """As a range's `duration_ms`."""

    @model_validator(mode="after")
    def _check(self) -> "KvCacheRetentionConfig":
        _check_priority("decode_retention_priority", self.decode_retention_priority)
        _check_duration("decode_duration_ms", self.decode_duration_ms)
        ordered = self.ordered
        for one, other in pairwise(ordered):
            if one.token_end is None or one.token_end > other.token_start:
                raise ValueError(
                    f"token_range_retention_configs overlap: {shown(one)} and {shown(other)}; "
                    "a token may be in one range."
                )
        return self

    @property
    def ordered(self) -> "list[KvCacheRetentionConfig.TokenRangeRetentionConfig]":
        """The ranges by where they begin."""
        return sorted(self.token_range_retention_configs, key=lambda each: each.token_start)


def shown(one: KvCacheRetentionConfig.TokenRangeRetentionConfig) -> str:
    """A range in a message."""
    return f"{one.token_start} to {'the end' if one.token_end is None else one.token_end}"


def _check_priority(name: str, value: int) -> None:
    if not 0 <= value <= HIGHEST_PRIORITY:
        raise ValueError(f"{name} must be from 0 to {HIGHEST_PRIORITY}, but is {value}.")


def _check_duration(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= LONGEST_MS:
        raise ValueError(f"{name} must be from 0 to {LONGEST_MS} milliseconds, but is {value}.")


def _explain(error: ValidationError, cls: type[BaseModel]) -> RequestError:
    """One sentence on the first field at fault."""
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "value_error":
        where = f"{path}: " if path else ""
        return RequestError(f"{NAME}: {where}{first['ctx']['error']}", param=NAME)
    if first["type"] == "extra_forbidden":
        near = nearest(str(first["loc"][-1]), cls.model_fields)
        hint = f"; the nearest is {near}." if near else "."
        return RequestError(f"{NAME} has no field {path}{hint}", param=NAME)
    if first["type"] == "missing":
        return RequestError(f"{NAME}: {path} is missing.", param=NAME)
    wanted = WORDS.get(first["type"], first["msg"])
    return RequestError(f"{NAME}: {path} must be {wanted}, but holds {repr(first['input'])[:60]}.", param=NAME)
