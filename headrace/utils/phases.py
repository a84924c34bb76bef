# SPDX-License-Identifier: Apache-2.0
"""Where a start's time goes: phases one after another, which sum to the whole."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from headrace.utils.machine import read_text

WIDTH = 32
SHOWN_S = 0.005
"""Less than that has no line; the total holds it."""


class Phases:
    """A stopwatch whose laps have names. Times are `time.monotonic`, which processes of one machine share."""

    def __init__(self, began: float | None = None) -> None:
        """began: when the first phase did; None: now."""
        self._since = time.monotonic() if began is None else began
        self.seconds: dict[str, float] = {}
        """Of each phase, in order."""

    def end_of(self, name: str) -> None:
        """The time since the last phase's end was spent on this one."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def add(self, phases: Mapping[str, float]) -> None:
        """What another stopwatch saw since the last phase's end; what is left of the time is the next phase's."""
        for name, seconds in phases.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._since += seconds

    def lines(self, title: str) -> list[str]:
        """A table, for a log."""
        return [
            f"{title:<{WIDTH}}{'seconds':>10}",
            *(f"  {name:<{WIDTH - 2}}{each:10.2f}" for name, each in self.seconds.items() if each >= SHOWN_S),
            f"= {'total':<{WIDTH - 2}}{sum(self.seconds.values()):10.2f}",
        ]


def process_began() -> float:
    """When this process began, in `time.monotonic`'s seconds; now, where the system does not say."""
    now = time.monotonic()
    # The fields after the name, which may hold anything: the 20th is the start, in ticks since boot.
    fields = read_text(Path("/proc/self/stat")).rpartition(")")[2].split()
    if len(fields) < 20:
        return now
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)
