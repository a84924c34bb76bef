# SPDX-License-Identifier: Apache-2.0
"""Where the host's time goes: seconds that the core's loop has spent in each part of its steps."""

from time import perf_counter
from typing import Literal

Part = Literal["front_ends", "schedule", "launch", "wait", "update"]
PARTS: tuple[Part, ...] = ("front_ends", "schedule", "launch", "wait", "update")
"""Taking and giving messages; making plans; launching them; waiting for the device; reconciling results."""


class StepTimes:
    """A stopwatch with laps; one lap costs a tenth of a microsecond or two."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Totals since start; they only grow."""
        self._since = perf_counter()

    def start(self) -> None:
        """What was before belongs to no part: the loop slept."""
        self._since = perf_counter()

    def end_of(self, part: Part) -> None:
        """The time since the last call was spent in `part`."""
        now = perf_counter()
        self.seconds[part] += now - self._since
        self._since = now
