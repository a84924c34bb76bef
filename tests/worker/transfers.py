# SPDX-License-Identifier: Apache-2.0
"""What the tests of transfers share: arenas full of known bytes, and stores that behave as told."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from headrace.core.transfer import BlockCopy, Transfer, TransferResult
from headrace.worker.block_copier import CpuCopier, raw_blocks
from headrace.worker.host_cache import HostCache, HostLayout
from headrace.worker.kv_store import BlockKey, KvStore
from headrace.worker.kv_transfer import KvTransfers

NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 40
SHAPES = ((3, 2, 2, 8, 16), (1, 2, 1, 8, 8))
"""Per group: layers, K and V, heads, tokens, head_dim."""


def make_arena(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", gap: int = 0) -> Tensor:
    """Random bits; gap: bytes between blocks."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(num_bytes)
    bits = torch.randint(0, 256, (NUM_BLOCKS, num_bytes + gap), dtype=torch.uint8, generator=generator).to(device)
    return bits[:, :num_bytes].view(dtype).unflatten(1, tuple(shape))


def done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Rig:
    """Transfers over CPU arenas."""

    def __init__(
        self,
        store: KvStore | None = None,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
        num_host_blocks: int = NUM_HOST_BLOCKS,
    ) -> None:
        self.arenas = [make_arena(shape, dtype, gap=gap) for shape in SHAPES]
        self.blocks = [raw_blocks(arena) for arena in self.arenas]
        self.mark = done()
        sizes = [blocks.shape[1] for blocks in self.blocks]
        self.host = HostCache(HostLayout.side_by_side(sizes, num_host_blocks))
        self.transfers = KvTransfers(CpuCopier(self.arenas, self.host, lambda: self.mark), self.host, store)
        self.num_submitted = 0

    def submit(self, kind: str, copies: Sequence[tuple[int, int, int]], hashes: Sequence[bytes] = ()) -> int:
        """copies: (group, device block, host block)."""
        self.num_submitted += 1
        copied = [BlockCopy(*each) for each in copies]
        self.transfers.submit(Transfer(self.num_submitted, kind, copied, list(hashes)))
        return self.num_submitted

    def collect(self, count: int = 1, timeout_s: float = 20.0) -> list[TransferResult]:
        """Poll until so many results are there."""
        results: list[TransferResult] = []
        until = time.monotonic() + timeout_s
        while len(results) < count:
            assert time.monotonic() < until, f"{len(results)} of {count} results after {timeout_s} s"
            time.sleep(0.0005)
            results += self.transfers.poll()
        assert len(results) == count
        return results

    def run(self, kind: str, copies: Sequence[tuple[int, int, int]], hashes: Sequence[bytes] = ()) -> list[int]:
        """The failed copies of one transfer, waited for."""
        transfer_id = self.submit(kind, copies, hashes)
        result = self.collect()[0]
        assert result.transfer_id == transfer_id
        return result.failed


def outside(kind_of_block: int, group: int) -> bytes:
    """A block hash."""
    return bytes([kind_of_block, group]) * 16


class MemoryStore:
    """A dictionary, as slow and as broken as it is told to be."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, tuple[bytearray, int]] = {}
        self.gate = threading.Event()
        """Calls wait for it."""
        self.gate.set()
        self.raises: Exception | None = None
        self.is_closed = False
        self.num_calls = 0

    def _enter(self) -> None:
        self.num_calls += 1
        self.gate.wait()
        if self.raises is not None:
            raise self.raises

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._enter()
        return [key in self.blocks for key in keys]

    def load(self, key: BlockKey, into: memoryview) -> int | None:
        self._enter()
        if key not in self.blocks:
            return None
        block, checksum = self.blocks[key]
        into[:] = block
        return checksum

    def save(self, key: BlockKey, block: memoryview, checksum: int) -> None:
        self._enter()
        assert block.readonly
        self.blocks[key] = (bytearray(block), checksum)

    def close(self) -> None:
        self.is_closed = True


class NamedStore(MemoryStore):
    """A connector as a user would write one."""

    last: "NamedStore | None" = None

    def __init__(self, fingerprint: bytes) -> None:
        super().__init__()
        self.name = fingerprint
        NamedStore.last = self
