# SPDX-License-Identifier: Apache-2.0
"""Blocks between the device and the host, with their checksums: by the copy engines of a GPU, or in memory on a CPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
class Run:
    """Blocks that lie beside each other on both sides: one copy."""

    group: int
    device_block: int
    host_block: int
    count: int


def runs_of(copies: Iterable[BlockCopy], run_limits: Sequence[int]) -> Iterator[Run]:
    """run_limits: per group, a number of blocks across a multiple of which no run may go on the host."""
    run: Run | None = None
    for each in sorted(copies, key=lambda copy: (copy.group, copy.host_block)):
        if (
            run is not None
            and each.group == run.group
            and each.host_block == run.host_block + run.count
            and each.device_block == run.device_block + run.count
            and each.host_block % run_limits[each.group]
        ):
            run = Run(run.group, run.device_block, run.host_block, run.count + 1)
            continue
        if run is not None:
            yield run
        run = Run(each.group, each.device_block, each.host_block, 1)
    if run is not None:
        yield run


def check_ids(copies: Sequence[BlockCopy], arenas: Sequence[Tensor], host: HostCache) -> None:
    """Names of blocks that are not there are a mistake of whoever made the transfer: nothing must be written."""
    for each in copies:
        num_ready, num_blocks = host.num_ready_blocks(each.group), arenas[each.group].shape[0]
        if not (0 <= each.device_block < num_blocks and 0 <= each.host_block < num_ready):
            raise IndexError(f"{each}: there are {num_blocks} blocks on the device, and {num_ready} on the host.")


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
        check_ids(copies, self._arenas, self._host)
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
        check_ids(copies, self._arenas, self._host)
        stream = self._streams[direction]
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(mark)
            order = sorted(range(len(copies)), key=lambda index: copies[index].group)
            sums = self._sums(copies, order) if direction == "to_host" else None
            for run in runs_of(copies, self._run_limits):
                here = self._blocks[run.group][run.device_block : run.device_block + run.count]
                there = self._host.blocks(run.group, run.host_block, run.count)
                if direction == "to_host":
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)
            if sums is None:
                sums = self._sums(copies, order)
            done = torch.cuda.Event()
            done.record()
        return CudaCopying(direction, copies, order, sums, done, self._host, self._blocks)

    def _sums(self, copies: Sequence[BlockCopy], order: Sequence[int]) -> Tensor:
        """Checksums of the blocks as they lie on the device, on their way to pinned memory; in the order of `order`."""
        sums = torch.empty(len(copies), dtype=torch.int64, pin_memory=True)
        start = 0
        while start < len(order):
            group = copies[order[start]].group
            ids = [copies[index].device_block for index in order[start:] if copies[index].group == group]
            on_device = torch.tensor(ids, dtype=torch.int32).pin_memory().to(self._device, non_blocking=True)
            made = self._checksums(self._words[group], on_device)
            sums[start : start + len(ids)].copy_(made, non_blocking=True)
            start += len(ids)
        return sums

    def close(self) -> None:
        """See `BlockCopier.close`."""
        for stream in self._streams.values():
            stream.synchronize()


class CudaCopying:
    """Copies of one transfer on a stream."""

    def __init__(
        self,
        direction: Direction,
        copies: Sequence[BlockCopy],
        order: Sequence[int],
        sums: Tensor,
        done: torch.cuda.Event,
        host: HostCache,
        device_blocks: Sequence[Tensor],
    ) -> None:
        """sums: pinned, filled when `done` is; one for each copy, in the order of `order`."""
        self._direction = direction
        self._copies = copies
        self._order = order
        self._sums = sums
        self._done = done
        self._host = host
        self._device_blocks = device_blocks

    def is_done(self) -> bool:
        """See `Copying.is_done`."""
        return bool(self._done.query())

    def failed(self) -> list[int]:
        """See `Copying.failed`. Called where steps are launched: what came back wrong is cleared before the next."""
        failures = []
        for index, checksum in zip(self._order, self._sums.tolist(), strict=True):
            each = self._copies[index]
            checksums = self._host.checksums[each.group]
            if self._direction == "to_host":
                checksums[each.host_block] = checksum
            elif checksums[each.host_block] != checksum:
                with torch.inference_mode():
                    self._device_blocks[each.group][each.device_block].zero_()
                failures.append(index)
        return sorted(failures)
