# SPDX-License-Identifier: Apache-2.0
"""How load is put on a target: the limit, the order of a conversation, the arrivals, a target that goes away."""

import asyncio
import time

import pytest

from headrace.bench.dataset import BenchRequest
from headrace.bench.load import Load, Record, TargetGoneError


class Fake:
    """Answers after a moment; remembers how many were in flight, and what came after what."""

    def __init__(self, seconds: float = 0.005, gone_after: int | None = None) -> None:
        self.seconds = seconds
        self.gone_after = gone_after
        self.in_flight = self.most = self.done = 0
        self.log: list[tuple[str, object, float]] = []

    async def run(self, record: Record) -> None:
        record.started = time.perf_counter()
        self.log.append(("begin", record.request.task_id, record.started))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        if self.gone_after is not None and self.done >= self.gone_after:
            raise TargetGoneError("it fell over")
        self.done += 1
        record.ended = time.perf_counter()
        self.log.append(("end", record.request.task_id, record.ended))


def units(*sizes: int) -> list[list[BenchRequest]]:
    return [[BenchRequest(f"{i}.{j}", 1, (1,)) for j in range(size)] for i, size in enumerate(sizes)]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (None, 12)])
def test_no_more_are_in_flight_than_the_limit_and_no_fewer(concurrency: int | None, most: int) -> None:
    target = Fake()
    load = Load(target, units(*[1] * 12), [0.0] * 12, concurrency)
    asyncio.run(load.run())
    assert target.most == most
    assert len(load.records) == load.num_requests == 12
    assert load.seconds >= 0.005 * 12 / most


def test_a_turn_is_sent_when_the_one_before_it_has_ended() -> None:
    target = Fake()
    load = Load(target, units(3, 3), [0.0] * 2, 2)
    asyncio.run(load.run())
    for unit in ("0", "1"):
        mine = [(kind, task) for kind, task, _ in target.log if str(task).startswith(unit)]
        assert mine == [(kind, f"{unit}.{turn}") for turn in range(3) for kind in ("begin", "end")]
    assert target.most == 2


def test_requests_begin_when_they_arrive() -> None:
    target = Fake(seconds=0.2)
    load = Load(target, units(1, 1, 1), [0.0, 0.05, 0.1], None)
    asyncio.run(load.run())
    begun = [at - load.began for kind, _, at in target.log if kind == "begin"]
    assert begun == pytest.approx([0.0, 0.05, 0.1], abs=0.04)


def test_when_the_target_is_gone_the_load_ends_and_what_there_is_stays() -> None:
    target = Fake(gone_after=4)
    load = Load(target, units(*[1] * 50), [0.0] * 50, 2)
    with pytest.raises(TargetGoneError, match="it fell over"):
        asyncio.run(load.run())
    assert len(load.records) == 4
    assert target.in_flight == 0 and len(target.log) < 14


def test_when_it_is_cancelled_nothing_is_left_running() -> None:
    target = Fake(seconds=0.02)
    load = Load(target, units(*[1] * 50), [0.0] * 50, 2)

    async def main() -> None:
        task = asyncio.ensure_future(load.run())
        await asyncio.sleep(0.07)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert 2 <= len(load.records) <= 8
    assert target.in_flight == 0 and load.ended > load.began
