# SPDX-License-Identifier: Apache-2.0
"""What `headrace serve` needs beyond the engine."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import Beta, Common, Config, Count, Hint
from headrace.errors import ConfigError


class ServerConfig(Config):
    """HTTP server"""

    host: Annotated[str, Common] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: Annotated[int, Field(ge=0, le=65535), Common] = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: Annotated[tuple[str, ...], Hint(common=True, secret=True)] = ()
    """Key that clients must send as `Authorization: Bearer KEY`; repeat the flag for more than one."""
    api_key_file: str | None = None
    """File with one such key a line."""
    admin_key: Annotated[tuple[str, ...], Hint(secret=True)] = ()
    """Key for `/server_info`, `/kv_cache_events` and, to come, the routes that change the server; without one they take
    an `api_key`."""
    admin_key_file: str | None = None
    """File with one admin key a line."""
    max_body_bytes: Count = 32 * 1024 * 1024
    """Largest request body; larger ones get 413."""
    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 3.0
    """Seconds that running requests are given to finish when the server is told to stop."""
    keep_alive_timeout_s: Count = 75
    """Whole seconds that an idle connection stays open."""
    max_waiting_requests: Annotated[Count | None, Beta] = None
    """Sequences (each choice of each prompt is one) that may wait before new requests get 503; none: no limit."""
    allow_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS); `*` is all."""
    access_log: bool = False
    """Log a line for each request."""
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], Common] = "info"
    """How much is logged."""

    def with_key_files(self) -> "ServerConfig":
        """The same with the key files' keys among `api_key` and `admin_key`. Raises ConfigError, naming the file."""
        keys = (*self.api_key, *_keys_in("api_key_file", self.api_key_file))
        admin_keys = (*self.admin_key, *_keys_in("admin_key_file", self.admin_key_file))
        return self.model_copy(update={"api_key": keys, "admin_key": admin_keys})


def _keys_in(name: str, file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        keys = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{name} = {file} cannot be read: {reason}.", param=name) from None
    found = [key for key in keys if key and not key.startswith("#")]
    if not found:
        raise ConfigError(f"{name} = {file} holds no key; put one on each line.", param=name)
    return found
