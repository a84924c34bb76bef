# SPDX-License-Identifier: Apache-2.0
"""Blocks between the device and the host, with their checksums: by the copy engines of a GPU, or in memory on a CPU."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.transfer import BlockCopy
from headrace.kernels.block_checksum import block_checksums, checksum_of
from headrace.worker.host_cache import HostCache

Direction = Literal["to_host", "to_device"]
IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


class Copying(Protocol):
    """Copies that are under way."""

    def is_done(self) -> bool: ...

    def failed(self) -> list[int]:
        """Once done: the copies whose block did not come back as it had left."""
        ...


class BlockCopier(Protocol):
    """Copies blocks; one thread per direction calls `copy`."""

    def mark(self) -> Any:
        """Where the device's work has got to, for `copy` to begin after: called where steps are launched."""
        ...

    def copy(self, direction: Direction, copies: Sequence[BlockCopy], mark: Any) -> Copying: ...

    def close(self) -> None:
        """Wait for what is under way."""
        ...


def raw_blocks(arena: Tensor) -> Tensor:
    """An arena [num_blocks, ...], each block contiguous, as bytes: uint8 [num_blocks, block_bytes]."""
    num_bytes = arena[0].numel() * arena.itemsize
    return arena.view(torch.uint8).as_strided((arena.shape[0], num_bytes), (arena.stride(0) * arena.itemsize, 1))


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """The copies of one group, in the order of their blocks on the host."""

    group: int
    indices: IntArray
    """Their places in the transfer."""
    device_blocks: IntArray
    host_blocks: IntArray

    def runs(self, limit: int) -> list[tuple[int, int, int]]:
        """(device block, host block, count) of what lies side by side on both sides, and so is one copy.

        limit: a number of blocks across a multiple of which no run may go on the host.
        """
        device, host = self.device_blocks, self.host_blocks
        breaks = (np.diff(device) != 1) | (np.diff(host) != 1) | (host[1:] % limit == 0)
        starts = np.flatnonzero(np.concatenate(([True], breaks)))
        counts = np.diff(starts, append=len(host))
        return list(zip(device[starts].tolist(), host[starts].tolist(), counts.tolist(), strict=True))


def by_group(copies: Sequence[BlockCopy], arenas: Sequence[Tensor], host: HostCache) -> list[GroupCopies]:
    """A transfer's copies, group by group.

    Raises:
        IndexError: one names a block that is not there. Nothing must be written then: whoever made it is mistaken.
    """
    table = np.array([(each.group, each.device_block, each.host_block) for each in copies], np.int64).reshape(-1, 3)
    found = []
    for group in np.unique(table[:, 0]).tolist():
        indices = np.flatnonzero(table[:, 0] == group)
        indices = indices[np.argsort(table[indices, 2])]
        device_blocks, host_blocks = table[indices, 1], table[indices, 2]
        num_blocks, num_ready = arenas[group].shape[0], host.num_ready_blocks(group)
        for ids, count, where in ((device_blocks, num_blocks, "device"), (host_blocks, num_ready, "host")):
            if ids.min() < 0 or ids.max() >= count:
                raise IndexError(f"blocks {ids.min()} to {ids.max()} of group {group}: the {where} has {count}.")
        found.append(GroupCopies(group, indices, device_blocks, host_blocks))
    return found


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies that have ended."""

    failures: list[int]

    def is_done(self) -> bool:
        return True

    def failed(self) -> list[int]:
        return self.failures


class CpuCopier:
    """Plain copies, done when `copy` returns. The device is this host: its work is what the launch queue holds."""

    def __init__(self, arenas: Sequence[Tensor], host: HostCache, mark: Callable[[], "Future[None]"]) -> None:
        """mark: submits work that does nothing, and so ends when all before it has."""
        self.mark = mark
        self._arenas = arenas
        self._blocks = [raw_blocks(arena).numpy() for arena in arenas]
        self._host = host

    def copy(self, direction: Direction, copies: Sequence[BlockCopy], mark: "Future[None]") -> Copied:
        """See `BlockCopier.copy`."""
        mark.result()
        by_group(copies, self._arenas, self._host)
        failures = []
        for index, each in enumerate(copies):
            # numpy copies on this thread alone; torch would take threads that compute.
            on_device = self._blocks[each.group][each.device_block]
            on_host = self._host.blocks(each.group, each.host_block)[0].numpy()
            checksums = self._host.checksums[each.group]
            if direction == "to_host":
                checksums[each.host_block] = checksum_of(on_device)
                np.copyto(on_host, on_device)
            else:
                np.copyto(on_device, on_host)
                if checksum_of(on_device) != checksums[each.host_block]:
                    on_device.fill(0)
                    failures.append(index)
        return Copied(failures)

    def close(self) -> None:
        """See `BlockCopier.close`."""


class CudaCopier:
    """A stream in each direction, beside the one that computes; checksums are made and checked on the device."""

    def __init__(self, arenas: Sequence[Tensor], host: HostCache) -> None:
        self._device = arenas[0].device
        self._arenas = arenas
        self._host = host
        self._blocks = [raw_blocks(arena) for arena in arenas]
        self._words = [blocks.view(torch.int64) for blocks in self._blocks]
        # Blocks with a gap between them are no one copy.
        self._run_limits = [
            host.blocks_per_run(group) if blocks.is_contiguous() else 1 for group, blocks in enumerate(self._blocks)
        ]
        self._checksums: Callable[[Tensor, Tensor], Tensor] = block_checksums.choose("cuda")
        self._streams: dict[str, torch.cuda.Stream] = {}
        for direction in ("to_host", "to_device"):
            self._streams[direction] = torch.cuda.Stream(self._device)
        for group in range(len(arenas)):
            # Compiles the kernel: not while others wait.
            self._checksums(self._words[group], torch.zeros(1, dtype=torch.int32, device=self._device))

    def mark(self) -> torch.cuda.Event:
        """See `BlockCopier.mark`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, direction: Direction, copies: Sequence[BlockCopy], mark: torch.cuda.Event) -> "CudaCopying":
        """See `BlockCopier.copy`."""
        groups = by_group(copies, self._arenas, self._host)
        stream = self._streams[direction]
        sums: list[Tensor] = []
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(mark)
            for each in groups:
                if direction == "to_host":
                    sums.append(self._sums(each))
                blocks = self._blocks[each.group]
                for device_block, host_block, count in each.runs(self._run_limits[each.group]):
                    here = blocks[device_block : device_block + count]
                    there = self._host.blocks(each.group, host_block, count)
                    if direction == "to_host":
                        there.copy_(here, non_blocking=True)
                    else:
                        here.copy_(there, non_blocking=True)
                if direction == "to_device":
                    sums.append(self._sums(each))
            done = torch.cuda.Event()
            done.record()
        return CudaCopying(direction, groups, sums, done, self._host, self._blocks)

    def _sums(self, copies: GroupCopies) -> Tensor:
        """Checksums of the blocks as they lie on the device, on their way to pinned memory."""
        ids = torch.from_numpy(copies.device_blocks).int().pin_memory().to(self._device, non_blocking=True)
        sums = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
        return sums.copy_(self._checksums(self._words[copies.group], ids), non_blocking=True)

    def close(self) -> None:
        """See `BlockCopier.close`."""
        for stream in self._streams.values():
            # On a device that is lost nothing is under way any more.
            with contextlib.suppress(RuntimeError):
                stream.synchronize()


class CudaCopying:
    """Copies of one transfer on a stream."""

    def __init__(
        self,
        direction: Direction,
        groups: Sequence[GroupCopies],
        sums: Sequence[Tensor],
        done: torch.cuda.Event,
        host: HostCache,
        device_blocks: Sequence[Tensor],
    ) -> None:
        """sums: of each group, pinned, filled when `done` is."""
        self._direction = direction
        self._groups = groups
        self._sums = sums
        self._done = done
        self._host = host
        self._device_blocks = device_blocks

    def is_done(self) -> bool:
        """See `Copying.is_done`."""
        return bool(self._done.query())

    def failed(self) -> list[int]:
        """See `Copying.failed`. Called where steps are launched: what came back wrong is cleared before the next."""
        failures: list[int] = []
        for each, sums in zip(self._groups, self._sums, strict=True):
            checksums = self._host.checksums[each.group]
            if self._direction == "to_host":
                checksums[each.host_blocks] = sums.numpy()
                continue
            is_wrong = checksums[each.host_blocks] != sums.numpy()
            failures += each.indices[is_wrong].tolist()
            for block in each.device_blocks[is_wrong].tolist():
                with torch.inference_mode():
                    self._device_blocks[each.group][block].zero_()
        return sorted(failures)
