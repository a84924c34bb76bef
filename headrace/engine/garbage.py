# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, kept out of the way of steps.

A full collection looks at every object there is. With a prefix cache of 100,000 blocks that takes 200 ms, in which the
device has nothing to do. So in the core's own process full collections wait until no request runs; what lives through
one is frozen, so that the next looks at what is new since then. Objects without cycles, nearly all, need no collector.
"""

import gc

NEVER = 1 << 30
STEPS_BETWEEN = 10_000
"""Less work than this since the last collection is not worth the wait of a request that might come meanwhile."""


class IdleCollector:
    """Collects in idle time only, in a process that is the caller's alone and may have begun without a collector."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._collect()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        gc.enable()

    def when_idle(self, num_steps: int) -> None:
        """Collect, if enough has been done since the last time. num_steps: steps since start."""
        if num_steps - self._num_steps >= STEPS_BETWEEN:
            self._num_steps = num_steps
            self._collect()

    @staticmethod
    def _collect() -> None:
        gc.collect()
        gc.freeze()
