# SPDX-License-Identifier: Apache-2.0
"""Tiers without memory: blocks hold what a simulated worker wrote, and whoever uses one too early is found out."""

import random
from collections.abc import Callable, Hashable
from typing import Protocol

from headrace.core.transfer import BlockCopy, Transfer, TransferResult

GARBAGE = -7
"""In every slot of a block that is under way."""

Content = list[int]


class Blocks(Protocol):
    """A simulated device."""

    num_launched: int
    """Plans, since the start."""
    num_carried_out: int

    def read_block(self, group: int, block_id: int) -> Content: ...

    def write_block(self, group: int, block_id: int, content: Content) -> None: ...


class SimulatedTransfers:
    """Carries transfers out as late as allowed: after the plans launched before them, and a number of polls.

    What a transfer writes to holds garbage until its result; what it reads from must stay as it is so long, but for the
    device's blocks: of those that change on the way to the host, the host has something else in the end, and as sound.
    """

    def __init__(
        self,
        device: Blocks,
        num_host_blocks: int,
        rng: random.Random | None = None,
        fails: Callable[[Transfer, int], bool] = lambda transfer, index: False,
        store: dict[tuple[bytes, int], Content] | None = None,
    ) -> None:
        """
        Args:
            rng: chooses how many polls each transfer takes, and which ends first; None: each ends when it may.
            fails: whether a copy (index) of a transfer does.
            store: outside storage, shared by whoever has it.
        """
        self.store: dict[tuple[bytes, int], Content] = {} if store is None else store
        self.host: dict[tuple[int, int], Content] = {}
        self._device = device
        self._num_host_blocks = num_host_blocks
        self._rng = rng
        self._fails = fails
        self._under_way: list[tuple[int, Transfer, list[Content]]] = []
        """With each the number of plans it waits for, and, once these are done, what its sources hold."""
        self._read_by: dict[Hashable, int] = {}
        self._written: set[Hashable] = set()

    def submit(self, transfer: Transfer) -> None:
        """As an executor's `transfer`."""
        assert transfer.kind in ("to_host", "to_device") or len(transfer.hashes) == len(transfer.copies)
        for copy in transfer.copies:
            if transfer.kind in ("to_host", "to_device", "store", "fetch"):
                assert 0 <= copy.host_block < self._num_host_blocks, f"no such block on the host: {copy}"
            source, target = _ends(transfer, copy)
            if source is not None:
                assert source not in self._written, f"{transfer.kind} reads {source}, which is being written"
            if source is not None and transfer.kind != "to_host":
                self._read_by[source] = self._read_by.get(source, 0) + 1
            if target is not None:
                assert target not in self._written, f"{transfer.kind} writes {target}, which is being written"
                assert not self._read_by.get(target), f"{transfer.kind} writes {target}, which is being read"
                self._written.add(target)
        self._under_way.append((self._device.num_launched, transfer, []))

    def poll(self) -> list[TransferResult]:
        """As an executor's `poll_transfers`."""
        results = []
        for entry in list(self._under_way):
            num_plans, transfer, before = entry
            if num_plans > self._device.num_carried_out:
                continue
            if not before:
                # The steps launched before are done: from here on nobody may touch these blocks.
                self._begin(transfer, before)
            if self._rng is None or self._rng.random() < 0.5:
                self._under_way.remove(entry)
                results.append(TransferResult(transfer.transfer_id, self._carry_out(transfer, before)))
        return results

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def _begin(self, transfer: Transfer, before: list[Content]) -> None:
        for copy in transfer.copies:
            source, target = _ends(transfer, copy)
            before.append([] if source is None else self._get(source))
            if target is not None:
                self._put(target, self._garbage(copy.group))

    def _carry_out(self, transfer: Transfer, before: list[Content]) -> list[int]:
        failed = []
        for index, copy in enumerate(transfer.copies):
            source, target = _ends(transfer, copy)
            if source is not None and transfer.kind == "to_host":
                before[index] = self._get(source)
            elif source is not None:
                assert self._get(source) == before[index], f"{source} was changed during {transfer.kind}"
                self._read_by[source] -= 1
            if target is not None:
                self._written.discard(target)
                assert self._get(target) == self._garbage(copy.group), f"{target} was written during {transfer.kind}"
            if not self._copy(transfer, index, before[index], target) or self._fails(transfer, index):
                failed.append(index)
                if target is not None:
                    self._put(target, self._garbage(copy.group))
        return failed

    def _copy(self, transfer: Transfer, index: int, content: Content, target: Hashable | None) -> bool:
        copy = transfer.copies[index]
        if transfer.kind in ("lookup", "fetch", "store"):
            key = (transfer.hashes[index], copy.group)
            if transfer.kind == "store":
                self.store[key] = content
                return True
            if key not in self.store:
                return False
            content = self.store[key]
        if target is None:
            return True
        self._put(target, content)
        # What was garbage when it left is found out by its checksum when it is back.
        return transfer.kind != "to_device" or content != self._garbage(copy.group)

    def _garbage(self, group: int) -> Content:
        return [GARBAGE] * len(self._device.read_block(group, 0))

    def _get(self, place: Hashable) -> Content:
        where, group, block_id = place  # type: ignore[misc]
        if where == "device":
            return list(self._device.read_block(group, block_id))
        return self.host.get((group, block_id), self._garbage(group))

    def _put(self, place: Hashable, content: Content) -> None:
        where, group, block_id = place  # type: ignore[misc]
        if where == "device":
            self._device.write_block(group, block_id, list(content))
        else:
            self.host[group, block_id] = list(content)


def _ends(transfer: Transfer, copy: BlockCopy) -> tuple[Hashable | None, Hashable | None]:
    """The places that a copy reads and writes, where those are blocks of the device or the host."""
    device, host = ("device", copy.group, copy.device_block), ("host", copy.group, copy.host_block)
    ends: dict[str, tuple[Hashable | None, Hashable | None]] = {
        "to_host": (device, host), "to_device": (host, device), "store": (host, None), "fetch": (None, host),
        "lookup": (None, None),
    }  # fmt: skip
    return ends[transfer.kind]
