# SPDX-License-Identifier: Apache-2.0
"""Carries transfers out beside the steps: what is submitted goes to threads of its own, and no step waits for it."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.core.transfer import BlockCopy, Transfer, TransferResult
from headrace.logger import get_logger
from headrace.worker.block_copier import BlockCopier, Copied, Copying, Direction
from headrace.worker.host_cache import HostCache
from headrace.worker.kv_store import BlockKey, KvStore

STORE_THREADS = {"store": 2, "fetch": 6, "lookup": 2}
"""Per kind, so that nothing waits behind a kind of call that is slow; loads check sums, at about 1.7 GB/s a thread."""
CLOSE_S = 5.0
"""How long the end waits for calls of a store that do not return."""

logger = get_logger(__name__)


class KvTransfers:
    """Moves blocks. `submit`, `poll` and `close` are called where steps are launched; none of them waits for a copy."""

    def __init__(self, copier: BlockCopier, host: HostCache, store: KvStore | None = None) -> None:
        self.host = host
        self._copier = copier
        self._results: deque[TransferResult] = deque()
        self._movers = {"to_host": _Mover(copier, "to_host"), "to_device": _Mover(copier, "to_device")}
        self._calls = None if store is None else _StoreCalls(store, host, self._results)
        self._is_closed = False

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer after the steps launched so far. Its result comes out of `poll`."""
        assert not self._is_closed, "the transfers are closed"
        if transfer.kind == "to_host" or transfer.kind == "to_device":
            self._movers[transfer.kind].submit(transfer, self._copier.mark())
        elif self._calls is not None:
            self._calls.submit(transfer)
        else:
            self._results.append(_all_failed(transfer))

    def poll(self) -> list[TransferResult]:
        """What has ended since the last call, each transfer once."""
        results = [result for mover in self._movers.values() for result in mover.poll()]
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """End, dropping what has not begun. Any number of times."""
        if self._is_closed:
            return
        self._is_closed = True
        for mover in self._movers.values():
            mover.close()
        self._copier.close()
        # A call that does not return keeps the memory it works on.
        if self._calls is None or self._calls.close():
            self.host.close()


class _Mover:
    """One direction between device and host: a thread that launches copies in the order of their submission."""

    def __init__(self, copier: BlockCopier, direction: Direction) -> None:
        self._copier = copier
        self._direction: Direction = direction
        self._work: queue.SimpleQueue[tuple[Transfer, Any] | None] = queue.SimpleQueue()
        self._under_way: deque[tuple[Transfer, Copying]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=f"headrace-{direction}", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer, mark: Any) -> None:
        self._work.put((transfer, mark))

    def poll(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        while self._under_way:
            transfer, copying = self._under_way[0]
            try:
                if not copying.is_done():
                    break
                failed = copying.failed()
            except RuntimeError as error:
                failed = _say_and_fail_all(transfer, error)
            self._under_way.popleft()
            results.append(TransferResult(transfer.transfer_id, failed))
        return results

    def close(self) -> None:
        """Let the copy that is being launched be launched, and no other."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (work := self._work.get()) is not None and not self._is_closed:
            transfer, mark = work
            copying: Copying
            try:
                copying = self._copier.copy(self._direction, transfer.copies, mark)
            except Exception as error:
                copying = Copied(_say_and_fail_all(transfer, error))
            self._under_way.append((transfer, copying))


class _StoreCalls:
    """Calls of outside storage, on threads that may hang without anybody else doing so."""

    def __init__(self, store: KvStore, host: HostCache, results: deque[TransferResult]) -> None:
        self._store = store
        self._host = host
        self._results = results
        self._is_closed = False
        self._failing: set[str] = set()
        """Kinds whose last call failed: said once, until one succeeds."""
        self._work: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for kind, count in STORE_THREADS.items():
            work = self._work[kind] = queue.SimpleQueue()
            for _ in range(count):
                thread = threading.Thread(target=self._loop, args=(work,), name=f"headrace-{kind}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def submit(self, transfer: Transfer) -> None:
        assert len(transfer.hashes) == len(transfer.copies), "each block has a name outside"
        work = self._work[transfer.kind]
        if transfer.kind == "lookup":
            work.put(partial(self._lookup, transfer))
        elif transfer.copies:
            parts = _Parts(transfer, self._results)
            # As many threads as there are take one copy after the other.
            for _ in range(min(STORE_THREADS[transfer.kind], len(transfer.copies))):
                work.put(partial(self._move, transfer, parts))
        else:
            self._results.append(TransferResult(transfer.transfer_id, []))

    def close(self) -> bool:
        """Whether all calls have returned."""
        self._is_closed = True
        for kind, count in STORE_THREADS.items():
            for _ in range(count):
                self._work[kind].put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("A call of the outside KV store has not returned; it is left behind.")
            return False
        self._store.close()
        return True

    def _loop(self, work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (call := work.get()) is not None:
            if not self._is_closed:
                call()

    def _move(self, transfer: Transfer, parts: "_Parts") -> None:
        call = self._save if transfer.kind == "store" else self._load
        while not self._is_closed and (index := parts.take()) is not None:
            copy = transfer.copies[index]
            key = BlockKey(transfer.hashes[index], copy.group)
            parts.ended(index, self._try(transfer.kind, partial(call, key, copy)))

    def _save(self, key: BlockKey, copy: BlockCopy) -> bool:
        checksum = int(self._host.checksums[copy.group][copy.host_block])
        self._store.save(key, self._host.memory(copy.group, copy.host_block).toreadonly(), checksum)
        return True

    def _load(self, key: BlockKey, copy: BlockCopy) -> bool:
        checksum = self._store.load(key, self._host.memory(copy.group, copy.host_block))
        if checksum is None:
            return False
        self._host.checksums[copy.group][copy.host_block] = checksum
        return True

    def _lookup(self, transfer: Transfer) -> None:
        keys = [BlockKey(name, each.group) for name, each in zip(transfer.hashes, transfer.copies, strict=True)]
        found: list[bool] = []

        def look() -> bool:
            found.extend(self._store.lookup(keys))
            return len(found) == len(keys)

        if self._try("lookup", look):
            misses = [index for index, is_there in enumerate(found) if not is_there]
            self._results.append(TransferResult(transfer.transfer_id, misses))
        else:
            self._results.append(_all_failed(transfer))

    def _try(self, kind: str, call: Callable[[], bool]) -> bool:
        """Whether it succeeded; what it raises is a failure, said once."""
        try:
            done = call()
        except Exception as error:
            if kind not in self._failing:
                self._failing.add(kind)
                logger.warning(
                    "The outside KV store fails to %s (%s: %s); blocks are computed anew meanwhile.",
                    {"store": "save", "fetch": "load", "lookup": "look up"}[kind],
                    type(error).__name__,
                    error,
                )
            return False
        self._failing.discard(kind)
        return done


class _Parts:
    """The copies of one transfer, which are taken and end one by one."""

    def __init__(self, transfer: Transfer, results: deque[TransferResult]) -> None:
        self._transfer_id = transfer.transfer_id
        self._results = results
        self._lock = threading.Lock()
        self._to_take = iter(range(len(transfer.copies)))
        self._num_left = len(transfer.copies)
        self._failed: list[int] = []

    def take(self) -> int | None:
        """The next copy that nobody has taken; None: there is none."""
        with self._lock:
            return next(self._to_take, None)

    def ended(self, index: int, succeeded: bool) -> None:
        with self._lock:
            self._num_left -= 1
            if not succeeded:
                self._failed.append(index)
            if self._num_left == 0:
                self._results.append(TransferResult(self._transfer_id, sorted(self._failed)))


def _all_failed(transfer: Transfer) -> TransferResult:
    return TransferResult(transfer.transfer_id, list(range(len(transfer.copies))))


def _say_and_fail_all(transfer: Transfer, error: Exception) -> list[int]:
    logger.error("A transfer of KV blocks failed; they are computed anew.", exc_info=error)
    return list(range(len(transfer.copies)))
