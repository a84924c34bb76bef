# SPDX-License-Identifier: Apache-2.0
"""The connector: what outside storage must be able to do to keep KV blocks, and whose blocks are whose.

A store keeps whole blocks by name. It may be slow, lose blocks, be shared by several engines, and raise: a block that
does not come back is computed anew, and one that comes back changed is found out by its checksum.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import KvGroup

LAYOUT = 1
"""Of the bytes inside a block; another number, and no old block is found any more."""


class BlockKey(NamedTuple):
    """A block's name outside: what its tokens and all before them hash to, and the group whose KV it is."""

    hash: bytes
    group: int


class KvStore(Protocol):
    """Outside storage for blocks of one model and layout (`fingerprint`).

    All calls come from threads of their own, several at a time, and no step waits for any. An exception is a failed
    call: it is logged, and the engine goes on without the block.
    """

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these blocks are there. A block may be gone again when it is loaded."""
        ...

    def load(self, key: BlockKey, into: memoryview) -> int | None:
        """Fill `into` with a block and return the checksum it was saved with. None: it is not there, whatever is in
        `into` now."""
        ...

    def save(self, key: BlockKey, block: memoryview, checksum: int) -> None:
        """Keep a block, and a number of 64 bits (signed) with it. It may be there already. `block` is read before this
        returns."""
        ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


class KvStores:
    """Several stores as one: all keep a block, and the first that has it gives it."""

    def __init__(self, stores: Sequence[KvStore]) -> None:
        self._stores = list(stores)

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `KvStore.lookup`."""
        return [any(found) for found in zip(*(store.lookup(keys) for store in self._stores), strict=True)]

    def load(self, key: BlockKey, into: memoryview) -> int | None:
        """See `KvStore.load`."""
        for store in self._stores:
            checksum = store.load(key, into)
            if checksum is not None:
                return checksum
        return None

    def save(self, key: BlockKey, block: memoryview, checksum: int) -> None:
        """See `KvStore.save`. One that fails keeps none of the others from it."""
        with contextlib.ExitStack() as calls:
            for store in self._stores:
                calls.callback(store.save, key, block, checksum)

    def close(self) -> None:
        """See `KvStore.close`."""
        for store in self._stores:
            store.close()


def fingerprint(config: ResolvedConfig, groups: Sequence[KvGroup], weights: str) -> bytes:
    """32 bytes that are equal where blocks of equal tokens are equal: same weights, same shapes, same dtypes.

    weights: their digest (`weights_digest`). Equal in every process and on every machine.
    """
    facts: dict[str, Any] = {
        "layout": LAYOUT,
        "weights": weights,
        "model": msgspec.to_builtins(config.model, str_keys=True, enc_hook=str),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "tokens_per_block": config.tokens_per_block,
        "groups": msgspec.to_builtins(list(groups)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
