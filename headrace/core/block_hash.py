# SPDX-License-Identifier: Apache-2.0
"""Names of KV blocks by content: SHA-256, chained, the same in every process and after every restart.

    root   = H(MAGIC, extra key)
    block  = H(parent's hash, the block's tokens as little-endian 32-bit numbers)

A block's hash so stands for all tokens up to its end, and for what else changes their KV: the extra key. Equal tokens
under blocks of another size have other hashes. What differs between two models does not go in: whoever keeps blocks of
more than one model apart by hash gives each a place of its own.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

ExtraKey = tuple[str | None, ...]
"""What must be equal, besides tokens, for two blocks to be the same: `Request.cache_key`, the cache salt first."""

MAGIC = b"headrace kv 1\n"
"""Changes whenever equal blocks get other hashes than before."""
TOKEN_BYTES = 4

# Copying a fresh hash costs less than asking the library for one by name.
_EMPTY = hashlib.sha256()


def root_hash(extra_key: ExtraKey) -> bytes:
    """The parent of a first block.

    Parts of the key have a mark and a length, so that neither a salt can look like an adapter nor ("ab", "c") like
    ("a", "bc").
    """
    parts = [MAGIC, len(extra_key).to_bytes(4, "little")]
    for part in extra_key:
        if part is None:
            parts.append(b"\0")
        else:
            # Surrogates: a salt may be any text that JSON can spell.
            data = part.encode("utf-8", "surrogatepass")
            parts += [b"\1", len(data).to_bytes(8, "little"), data]
    return hashlib.sha256(b"".join(parts)).digest()


def child_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of the block with these tokens after `parent`, a block's or a root's hash."""
    return hashlib.sha256(parent + _packed(tokens)).digest()


def chain(
    extra_key: ExtraKey, token_ids: Sequence[int], tokens_per_block: int, parent: bytes | None = None
) -> list[bytes]:
    """The hashes of the whole blocks of `token_ids`; a tail that fills no block has none.

    Args:
        parent: hash of the block before the first of `token_ids`, to go on from there; None: they begin the sequence.
    """
    data = _packed(token_ids)
    size = tokens_per_block * TOKEN_BYTES
    last = root_hash(extra_key) if parent is None else parent
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        block = _EMPTY.copy()
        block.update(last + data[start : start + size])
        last = block.digest()
        hashes.append(last)
    return hashes


def as_int(block_hash: bytes) -> int:
    """A hash as events show it: its first 63 bits, which any reader's signed 64-bit integer holds."""
    return int.from_bytes(block_hash[:8], "big") >> 1


def _packed(tokens: Sequence[int]) -> bytes:
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
