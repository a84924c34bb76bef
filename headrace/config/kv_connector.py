# SPDX-License-Identifier: Apache-2.0
"""Outside storage for KV blocks: which one, and where."""

from typing import Literal

from pydantic import model_validator

from headrace.config.base import Config, Count


class KvCacheConnectorConfig(Config):
    """KV cache connector"""

    connector: Literal["folder"] | None = None
    """folder: a file per block in `path`, which engines on several machines may share."""
    path: str | None = None
    """The folder."""
    max_bytes: Count | None = None
    """Bytes that all files in the folder may take; the least recently used make room."""
    connector_module: str | None = None
    """Python module with a connector of your own; what it must do: `headrace.worker.kv_store.KvStore`."""
    connector_worker_class: str | None = None
    """Its class, made with the fingerprint of the model (32 bytes) as its only argument."""

    @model_validator(mode="after")
    def _one_connector_with_all_it_needs(self) -> "KvCacheConnectorConfig":
        own = (self.connector_module, self.connector_worker_class)
        folder = (self.connector, self.path, self.max_bytes)
        if None not in folder and own == (None, None):
            return self
        if None not in own and folder == (None, None, None):
            return self
        raise ValueError(
            "it takes connector (folder), path and max_bytes, or, for one of your own, connector_module and "
            f"connector_worker_class; given are {', '.join(sorted(self.model_fields_set)) or 'none of them'}."
        )
