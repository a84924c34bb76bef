# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory: KV blocks beside the device's, pinned where the device copies by itself."""

import contextlib
import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.logger import get_logger

GIB = 1 << 30
SETTING = "kv_cache_config.host_cache_size"
SLICE_BYTES = 64 << 20
"""Pinned at once: the driver serves nobody else meanwhile, which is a matter of milliseconds for so many."""
HOST_REGISTER_PORTABLE = 1
"""CUDA's flag: pinned for every GPU that this process uses."""
HOST_RESERVE_BYTES = 2 << 30
"""Of the host's free memory, left to others."""

logger = get_logger(__name__)

Pin = Callable[[Tensor], None]
"""Makes memory one that the device can copy by itself. RuntimeError where that cannot be."""


def num_host_blocks(host_cache_size: int, block_bytes: Sequence[int], free_bytes: int) -> int:
    """Blocks of each group that `host_cache_size` bytes hold; 0 bytes: none.

    block_bytes: of a block of each group. free_bytes: of the host, what this process may still take.

    Raises:
        ConfigError: the host has not so much, or it would hold no block.
    """
    if not host_cache_size:
        return 0
    most = max(0, free_bytes - HOST_RESERVE_BYTES)
    if host_cache_size > most:
        raise ConfigError(
            f"{SETTING} = {host_cache_size} ({host_cache_size / GIB:.1f} GiB) is more than this host has to give: "
            f"{free_bytes / GIB:.1f} GiB are free, {HOST_RESERVE_BYTES / GIB:.0f} of which are left to others; use at "
            f"most {most}.",
            param=SETTING,
        )
    if host_cache_size < sum(block_bytes):
        raise ConfigError(
            f"{SETTING} = {host_cache_size} holds no block: one of this model takes {sum(block_bytes)} bytes; use a "
            "multiple of that, or 0 for no host tier.",
            param=SETTING,
        )
    return host_cache_size // sum(block_bytes)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Where the blocks lie: block `i` of group `g` from byte `i * strides[g] + offsets[g]` on."""

    block_bytes: tuple[int, ...]
    """Of a block of each group."""
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    unit_bytes: int
    """No block goes across a multiple of this."""
    num_units: int

    @classmethod
    def side_by_side(cls, block_bytes: Sequence[int], num_blocks: int) -> "HostLayout":
        """`num_blocks` blocks of each group: those with the same id beside each other."""
        unit = sum(block_bytes)
        offsets = (0, *itertools.accumulate(block_bytes[:-1]))
        return cls(tuple(block_bytes), (unit,) * len(block_bytes), offsets, unit, num_blocks)

    @classmethod
    def in_slabs(
        cls, block_bytes: Sequence[int], block_strides: Sequence[int], slab_bytes: int, num_slabs: int
    ) -> "HostLayout":
        """Slabs that each serve one group at a time, cut into its blocks: the device's own layout."""
        return cls(tuple(block_bytes), tuple(block_strides), (0,) * len(block_bytes), slab_bytes, num_slabs)

    def num_blocks(self, group: int, num_units: int) -> int:
        """Block ids of a group in the first `num_units` units."""
        return num_units * self.unit_bytes // self.strides[group]


class HostCache:
    """The memory of a layout, with a checksum for each block.

    It comes in slices of whole units, and no run of blocks goes across two: CUDA refuses a copy over memory that was
    pinned in two pieces. The first slice is there at once, the others as a thread has pinned them.
    """

    def __init__(self, layout: HostLayout, pin: Pin | None = None, unpin: Pin | None = None) -> None:
        """
        Args:
            pin: for each slice, before it is used; None: memory is used as it comes, and takes none until written.
            unpin: for each pinned slice, at the end.

        Raises:
            ConfigError: not even the first slice could be pinned.
        """
        self.layout = layout
        groups = range(len(layout.block_bytes))
        self.checksums = [np.zeros(layout.num_blocks(group, layout.num_units), np.int64) for group in groups]
        """Of each group, what a block's checksum was when it left the device."""
        self.num_ready_units = 0
        """Units that can be used, the first ones; more from moment to moment until it is all."""
        self._per_slice = max(1, min(layout.num_units, SLICE_BYTES // layout.unit_bytes))
        self._slice_bytes = self._per_slice * layout.unit_bytes
        self._slices: list[Tensor] = []
        self._pin, self._unpin = pin, unpin
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if pin is None:
            while self._add_slice():
                pass
            return
        try:
            self._add_slice()
        except (RuntimeError, OSError) as error:
            size = layout.num_units * layout.unit_bytes
            raise ConfigError(
                f"{SETTING}: the host did not pin the first of {size} bytes ({error}); use less, or 0 for none.",
                param=SETTING,
            ) from error
        self._thread = threading.Thread(target=self._pin_others, name="headrace-pin-host-cache", daemon=True)
        self._thread.start()

    def num_ready_blocks(self, group: int) -> int:
        """Ids of blocks of a group that can be used, the first ones."""
        return self.layout.num_blocks(group, self.num_ready_units)

    def blocks_per_run(self, group: int) -> int:
        """A run of blocks does not go across a multiple of this."""
        stride = self.layout.strides[group]
        return self._slice_bytes // stride if stride == self.layout.block_bytes[group] else 1

    def blocks(self, group: int, start: int, count: int = 1) -> Tensor:
        """A run of blocks: uint8 [count, block_bytes]. IndexError where there are none, or not yet."""
        layout = self.layout
        if not 0 <= start <= start + count <= self.num_ready_blocks(group):
            ready = self.num_ready_blocks(group)
            raise IndexError(f"block {start + count - 1} of group {group} is none of the {ready} on the host.")
        size = layout.block_bytes[group]
        index, offset = divmod(start * layout.strides[group] + layout.offsets[group], self._slice_bytes)
        return self._slices[index][offset : offset + count * size].view(count, size)

    def memory(self, group: int, block: int) -> memoryview:
        """One block, to read and write."""
        return self.blocks(group, block)[0].numpy().data

    def close(self) -> None:
        """Let go of the memory; nothing may copy any more."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
        self.num_ready_units = 0
        while self._slices:
            memory = self._slices.pop()
            # A device that is lost has let go of it.
            with contextlib.suppress(RuntimeError):
                if self._unpin is not None:
                    self._unpin(memory)

    def _add_slice(self) -> bool:
        """False: all are there."""
        layout, num_units = self.layout, min(self._per_slice, self.layout.num_units - self.num_ready_units)
        if not num_units or self._is_closed.is_set():
            return False
        memory = self._map(num_units * layout.unit_bytes)
        if self._pin is not None:
            # Pages are faulted in here rather than while the driver pins them and others wait for it.
            ctypes.memset(memory.data_ptr(), 0, memory.numel())
            self._pin(memory)
        self._slices.append(memory)
        self.num_ready_units += num_units
        return True

    @staticmethod
    def _map(num_bytes: int) -> Tensor:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned many times faster; a child process has no use for a copy of them.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                pages.madvise(advice)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _pin_others(self) -> None:
        began = time.monotonic()
        layout = self.layout
        try:
            while self._add_slice():
                pass
        except (RuntimeError, OSError) as error:
            share = self.num_ready_units / layout.num_units
            logger.warning("The host cache stays at %.0f %%: the host pins no more memory (%s).", 100 * share, error)
            return
        size = self.num_ready_units * layout.unit_bytes
        logger.info("Host cache: %.1f GiB pinned in %.1f s.", size / GIB, time.monotonic() - began)


def pin_for_cuda(memory: Tensor) -> None:
    """Register memory with the driver."""
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), HOST_REGISTER_PORTABLE))


def unpin_for_cuda(memory: Tensor) -> None:
    """Take memory back from the driver."""
    _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _check(error: object) -> None:
    code = int(error)  # type: ignore[call-overload]
    if code:
        raise RuntimeError(f"CUDA error {code}: {torch.cuda.cudart().cudaGetErrorString(error)}")
