# SPDX-License-Identifier: Apache-2.0
"""Blocks that move between device, host and outside storage while steps run: what is asked for, and what came of it.

The one who asks keeps every block of a transfer as it is, neither freed nor written nor read, until the result: a step
that reads a block that came to the device is launched after it. But for what a to_host reads: where that is written to
meanwhile, the copy must not be used.
"""

from typing import Literal

import msgspec

TransferKind = Literal["to_host", "to_device", "store", "fetch", "lookup"]
"""to_host, to_device: between the device and the host. store, fetch: from the host to outside storage, and back.
lookup: which blocks outside storage has."""


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """One block of one KV group: where it lies, and where it goes. -1 where the transfer's kind has no such side."""

    group: int
    device_block: int
    host_block: int


class Transfer(msgspec.Struct, frozen=True):
    """Blocks to move, in any order among themselves and beside other transfers."""

    transfer_id: int
    kind: TransferKind
    copies: list[BlockCopy]
    hashes: list[bytes] = []
    """Of store, fetch and lookup, a block hash (32 bytes) per copy: outside, a block is named by its hash and group."""


class TransferResult(msgspec.Struct, frozen=True):
    """A transfer has ended."""

    transfer_id: int
    failed: list[int]
    """The copies (indices, ascending) that did not come about, whatever the reason, or whose block is not what it was:
    where they went to holds no such block, on the device none that could do harm (no NaN). Of a lookup: the blocks that
    are not there."""
