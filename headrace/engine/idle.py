# SPDX-License-Identifier: Apache-2.0
"""What is done while nothing runs, and when: a request that comes in the middle of it has to wait for it."""

import time
from collections.abc import Callable

from headrace.engine.garbage import IdleCollector

QUIET_S = 0.5
"""Without a step for so long, before idle time is used: a piece of work takes 10 to 70 ms, and soon after an answer the
next request of a closed loop is likely."""


class IdleTime:
    """Uses the time between requests: work of the worker's, a piece at a time, then a collection of garbage."""

    def __init__(
        self,
        work: Callable[[], bool],
        collector: IdleCollector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            work: does one piece; False: nothing is left to do.
            collector: called where nothing is left.
            clock: seconds.
        """
        self._work = work
        self._collector = collector
        self._clock = clock
        self._num_steps = -1
        self._quiet_from = 0.0
        self.is_done = False
        """Whether nothing is left of the worker's work."""

    def use(self, num_steps: int) -> int | None:
        """With nothing to run: do a piece of work, where it has been quiet for long enough.

        Args:
            num_steps: steps since start.

        Returns:
            milliseconds to listen for messages before the next call; None: until one comes.
        """
        if not self.is_done:
            now = self._clock()
            if num_steps != self._num_steps:
                self._num_steps, self._quiet_from = num_steps, now + QUIET_S
            if now < self._quiet_from:
                # Rounded up: 0 would have the loop spin.
                return int((self._quiet_from - now) * 1000) + 1
            if self._work():
                return 0
            self.is_done = True
        if self._collector is not None:
            self._collector.when_idle(num_steps)
        return None
