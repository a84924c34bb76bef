# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory: KV blocks beside the device's, pinned where the device copies by itself."""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.logger import get_logger
from headrace.utils.math import cdiv

GIB = 1 << 30
SETTING = "kv_cache_config.host_cache_size"
SLICE_BYTES = 64 << 20
"""Pinned at once: the driver serves nobody else meanwhile, which is a matter of milliseconds for so many."""
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


class HostCache:
    """Per group `num_blocks` blocks of `block_bytes`, with a checksum each.

    The memory comes in slices, and no run of blocks goes across two: CUDA refuses a copy over memory that was pinned in
    two pieces. The first slices are there at once, the others as a thread has pinned them.
    """

    def __init__(
        self, block_bytes: Sequence[int], num_blocks: int, pin: Pin | None = None, unpin: Pin | None = None
    ) -> None:
        """
        Args:
            block_bytes: of a block of each group.
            num_blocks: of each group.
            pin: for each slice, before it is used; None: memory is used as it comes, and takes none until written.
            unpin: for each pinned slice, at the end.

        Raises:
            ConfigError: not even the first slices could be pinned.
        """
        self.num_blocks = num_blocks
        self.checksums = [np.zeros(num_blocks, np.int64) for _ in block_bytes]
        """What a block's checksum was when it left the device."""
        self._block_bytes = list(block_bytes)
        self._per_slice = [max(1, min(num_blocks, SLICE_BYTES // size)) for size in block_bytes]
        self._slices: list[list[Tensor]] = [[] for _ in block_bytes]
        self._num_ready = [0] * len(block_bytes)
        self._pin, self._unpin = pin, unpin
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        order = sorted(
            (index * per_slice, group)
            for group, per_slice in enumerate(self._per_slice)
            for index in range(cdiv(num_blocks, per_slice))
        )
        firsts, others = order[: len(block_bytes)], order[len(block_bytes) :]
        try:
            self._add(firsts)
        except (RuntimeError, OSError) as error:
            size = num_blocks * sum(block_bytes)
            raise ConfigError(
                f"{SETTING}: the host did not pin the first of {size} bytes ({error}); use less, or 0 for none.",
                param=SETTING,
            ) from error
        if pin is None:
            self._add(others)
        else:
            self._thread = threading.Thread(
                target=self._pin_others, args=(others,), name="headrace-pin-host-cache", daemon=True
            )
            self._thread.start()

    def num_ready_blocks(self, group: int) -> int:
        """Blocks that can be used, the first ones; more from moment to moment until it is `num_blocks`."""
        return self._num_ready[group]

    def blocks_per_run(self, group: int) -> int:
        """A run of blocks does not go across a multiple of this."""
        return self._per_slice[group]

    def blocks(self, group: int, start: int, count: int = 1) -> Tensor:
        """A run of blocks: uint8 [count, block_bytes]."""
        index, offset = divmod(start, self._per_slice[group])
        return self._slices[group][index][offset : offset + count]

    def memory(self, group: int, block: int) -> memoryview:
        """One block, to read and write. IndexError where there is none, or not yet."""
        if not 0 <= block < self._num_ready[group]:
            raise IndexError(f"block {block} of group {group} is none of the {self._num_ready[group]} on the host.")
        return self.blocks(group, block)[0].numpy().data

    def close(self) -> None:
        """Let go of the memory; nothing may copy any more."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
        for slices in self._slices:
            if self._unpin is not None:
                for each in slices:
                    self._unpin(each)
            slices.clear()
        self._num_ready = [0] * len(self._num_ready)

    def _add(self, order: Sequence[tuple[int, int]]) -> None:
        """order: (first block, group) of each slice."""
        for first, group in order:
            if self._is_closed.is_set():
                return
            count = min(self._per_slice[group], self.num_blocks - first)
            memory = self._map(count * self._block_bytes[group]).view(count, -1)
            if self._pin is not None:
                self._pin(memory)
            self._slices[group].append(memory)
            self._num_ready[group] = first + count

    def _map(self, num_bytes: int) -> Tensor:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned many times faster; a child process has no use for a copy of them.
        pages.madvise(mmap.MADV_HUGEPAGE)
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pin is not None:
            # Pages are faulted in here rather than while the driver pins them and others wait for it.
            ctypes.memset(memory.data_ptr(), 0, num_bytes)
        return memory

    def _pin_others(self, order: Sequence[tuple[int, int]]) -> None:
        began = time.monotonic()
        try:
            self._add(order)
        except (RuntimeError, OSError) as error:
            logger.warning(
                "The host cache stays at %d of %d blocks: the host pins no more memory (%s).",
                min(self._num_ready),
                self.num_blocks,
                error,
            )
            return
        size = self.num_blocks * sum(self._block_bytes)
        logger.info("Host cache: %.1f GiB pinned in %.1f s.", size / GIB, time.monotonic() - began)


def pin_for_cuda(memory: Tensor) -> None:
    """Register memory with the driver."""
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))


def unpin_for_cuda(memory: Tensor) -> None:
    """Take memory back from the driver."""
    _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _check(error: object) -> None:
    code = int(error)  # type: ignore[call-overload]
    if code:
        raise RuntimeError(f"CUDA error {code}: {torch.cuda.cudart().cudaGetErrorString(error)}")
