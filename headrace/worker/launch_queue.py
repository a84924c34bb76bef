# SPDX-License-Identifier: Apache-2.0
"""Where launched work runs: a CUDA stream takes it as it comes; a CPU has one thread that works it off in order."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class LaunchQueue(Protocol):
    """Runs what is submitted, in order; the host may be any number of pieces of work ahead."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` after all that was submitted before."""
        ...

    def close(self) -> None:
        """Finish what was submitted, then stop. Any number of times."""
        ...


class InlineQueue:
    """Work that is only launched, and so is run at once: the device's stream is the queue."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with torch.inference_mode():
            _run(work, future)
        return future

    def close(self) -> None:
        """Nothing to stop."""


class ThreadQueue:
    """One thread that does everything torch does on a CPU: it alone owns the pool of compute threads."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: that a product may use."""
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="headrace-device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the worker is shut down")
            self._work.put(lambda: _run(work, future))
        return future

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()
                del work


def _run(work: Callable[[], T], future: "Future[T]") -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
