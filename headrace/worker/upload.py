# SPDX-License-Identifier: Apache-2.0
"""What one step sends to the device: words to write into the request rows, and lists the step reads, in one copy."""

from array import array
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headrace.kernels.batch_prep import WRITE_WORDS, apply_writes

NUM_STAGING_BUFFERS = 4
"""Pinned buffers in turn: more than the plans that are in flight."""


class StepWords:
    """The words of one step, gathered on the host: first the writes' records, then everything in the order it came."""

    def __init__(self) -> None:
        self._writes: list[tuple[int, int, int]] = []
        self._data = array("i")
        self._tensor: Tensor | None = None
        self._head = 0

    def write(self, dst: int, values: Iterable[int]) -> None:
        """Words for the rows' state, from the flat offset `dst` on."""
        start = len(self._data)
        self._data.extend(values)
        if len(self._data) > start:
            self._writes.append((dst, start, len(self._data) - start))

    def read(self, values: Iterable[int]) -> slice:
        """Words that the step reads; what `view` takes once the words are sent."""
        # Aligned to 16 bytes: Triton compiles a kernel anew for a pointer of another alignment.
        self._data.extend((0,) * (-len(self._data) % WRITE_WORDS))
        start = len(self._data)
        self._data.extend(values)
        return slice(start, len(self._data))

    def view(self, where: slice) -> Tensor:
        """int32 words on the device."""
        assert self._tensor is not None, "the words are sent first"
        return self._tensor[self._head + where.start : self._head + where.stop]

    def pack(self) -> array:  # type: ignore[type-arg]
        """Records and data as they travel."""
        self._head = len(self._writes) * WRITE_WORDS
        packed = array("i")
        for dst, start, length in self._writes:
            low = dst & 0xFFFFFFFF
            packed.extend((low - (1 << 32) if low >> 31 else low, dst >> 32, self._head + start, length))
        packed.extend(self._data)
        return packed

    def arrived(self, tensor: Tensor) -> None:
        """The packed words, on the device."""
        self._tensor = tensor

    @property
    def num_writes(self) -> int:
        """Writes to the rows' state."""
        return len(self._writes)

    @property
    def longest_write(self) -> int:
        """Words of the longest one."""
        return max((length for _, _, length in self._writes), default=0)


class Uploader:
    """Sends a step's words and carries out its writes. On a CPU the words are used where they lie."""

    def __init__(self, state: Tensor, capacity: int = 1 << 20) -> None:
        """state: the rows' flat int32 tensor. capacity: words of the staging buffer, whose address is fixed."""
        self._state = state
        self._apply: Callable[..., Tensor] = apply_writes.choose(state.device.type)
        self._is_cpu = state.device.type == "cpu"
        self._turn = 0
        if not self._is_cpu:
            self._device = torch.empty(capacity, dtype=torch.int32, device=state.device)
            self._pinned = [
                torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(NUM_STAGING_BUFFERS)
            ]
            self._copied = [torch.cuda.Event() for _ in range(NUM_STAGING_BUFFERS)]

    def send(self, words: StepWords) -> None:
        """Copy the words and write the rows; `words.view` works from here on."""
        packed = words.pack()
        if not packed:
            return
        host = torch.frombuffer(packed, dtype=torch.int32)
        there = host if self._is_cpu else self._copy(host)
        words.arrived(there)
        if words.num_writes:
            self._apply(self._state, there, words.num_writes, words.longest_write)

    def _copy(self, host: Tensor) -> Tensor:
        """Through the next pinned buffer; the host waits only if the device is that many steps behind."""
        size = host.shape[0]
        if size > self._device.shape[0]:
            # Rare: many long prompts admitted at once. Pageable, so the host waits for the copy.
            return host.to(self._state.device)
        turn = self._turn = (self._turn + 1) % NUM_STAGING_BUFFERS
        self._copied[turn].synchronize()
        self._pinned[turn][:size].copy_(host)
        there = self._device[:size]
        there.copy_(self._pinned[turn][:size], non_blocking=True)
        self._copied[turn].record()
        return there
