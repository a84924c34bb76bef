# SPDX-License-Identifier: Apache-2.0
"""Puts load on a target and keeps what each request took: a closed loop, an open one, or an open one with a limit."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.bench.dataset import BenchRequest

now = time.perf_counter


class TargetGoneError(Exception):
    """Nothing more will be answered: the engine died, or the server cannot be reached any more."""


@dataclass(slots=True)
class Record:
    """What one request took. Times in seconds of one clock."""

    request: BenchRequest
    started: float = 0.0
    """When it was sent."""
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer came; a piece holds a token, or several."""
    ended: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int | None = None
    """Prompt tokens served from the prefix cache; None: not said."""
    error: str | None = None


class Target(Protocol):
    """What requests are sent to."""

    async def run(self, record: Record) -> None:
        """Send `record.request` and fill the record in, an `error` included.

        Raises:
            TargetGoneError: it cannot answer any more.
        """
        ...


class Load:
    """Requests on their way through a target, and the records of those that have ended."""

    def __init__(
        self, target: Target, units: Sequence[Sequence[BenchRequest]], times: Sequence[float], concurrency: int | None
    ) -> None:
        """
        Args:
            units: what runs one after the other: the turns of a conversation, or one request.
            times: for each unit, seconds from the start before which it does not begin.
            concurrency: units in flight at most; None: no limit. One that is late for this is sent when it may be.
        """
        self._target = target
        self._units = units
        self._times = times
        self._limit = asyncio.Semaphore(concurrency) if concurrency else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: asyncio.Future[None] | None = None
        self.records: list[Record] = []
        self.began = 0.0
        self.ended = 0.0

    @property
    def num_requests(self) -> int:
        return sum(len(unit) for unit in self._units)

    @property
    def seconds(self) -> float:
        """From the first request sent to the last answer, or to now."""
        return (self.ended or now()) - self.began if self.began else 0.0

    async def run(self) -> None:
        """Send everything and wait for every answer.

        Raises:
            TargetGoneError: the target is gone; what had ended by then is in `records`.
            asyncio.CancelledError: stopped from outside; the same.
        """
        self._gone = asyncio.get_running_loop().create_future()
        self.began = now()
        sending = asyncio.ensure_future(self._send_all())
        try:
            await asyncio.wait({sending, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():
                self._gone.result()
            sending.result()
        finally:
            self.ended = now()
            self._gone.cancel()
            left = [task for task in (sending, *self._tasks) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _send_all(self) -> None:
        for unit, at in zip(self._units, self._times, strict=True):
            wait = self.began + at - now()
            if wait > 0:
                await asyncio.sleep(wait)
            if self._limit is not None:
                await self._limit.acquire()
            task = asyncio.ensure_future(self._run_unit(unit))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if self._limit is not None:
            self._limit.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._gone is not None
            if not self._gone.done():
                self._gone.set_exception(error)

    async def _run_unit(self, unit: Sequence[BenchRequest]) -> None:
        for request in unit:
            record = Record(request, num_prompt=len(request.input_ids or ()))
            await self._target.run(record)
            self.records.append(record)
