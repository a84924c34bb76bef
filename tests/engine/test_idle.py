# SPDX-License-Identifier: Apache-2.0
"""Idle time is used once it is quiet, a piece at a time, and not before."""

from headrace.engine.garbage import IdleCollector
from headrace.engine.idle import QUIET_S, IdleTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Collector(IdleCollector):
    def __init__(self) -> None:
        self.called_at: list[int] = []

    def when_idle(self, num_steps: int) -> None:
        self.called_at.append(num_steps)


class Work:
    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def __call__(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_work_waits_until_nothing_has_run_for_a_while() -> None:
    clock, work = Clock(), Work(5)
    idle = IdleTime(work, None, clock)
    first = idle.use(7)
    assert first is not None and QUIET_S * 1000 <= first <= QUIET_S * 1000 + 1
    clock.now += QUIET_S / 2
    # A message that starts no step (statistics, a health probe) does not begin the wait anew.
    second = idle.use(7)
    assert second is not None and 0 < second <= QUIET_S * 500 + 1
    assert work.left == 5
    clock.now += QUIET_S
    assert idle.use(7) == 0 and work.left == 4


def test_a_request_in_between_makes_it_wait_again() -> None:
    clock, work = Clock(), Work(5)
    idle = IdleTime(work, None, clock)
    idle.use(0)
    clock.now += QUIET_S
    assert idle.use(0) == 0
    later = idle.use(3)
    assert later is not None and later > 0 and work.left == 4


def test_with_all_done_the_loop_sleeps_and_garbage_is_collected_at_once() -> None:
    clock, work, collector = Clock(), Work(2), Collector()
    idle = IdleTime(work, collector, clock)
    idle.use(0)
    clock.now += QUIET_S
    assert [idle.use(0) for _ in range(3)] == [0, 0, None]
    assert idle.is_done and collector.called_at == [0]
    assert idle.use(40_000) is None
    assert collector.called_at == [0, 40_000] and work.left == -1
