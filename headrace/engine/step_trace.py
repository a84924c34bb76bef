# SPDX-License-Identifier: Apache-2.0
"""A trace of the device over some steps of the core's loop, asked for by a front end."""

from collections.abc import Callable
from typing import Any

from headrace.engine.executor import Tracer
from headrace.engine.step_times import Part, StepTimes

NUM_SKIPPED = 4
"""Steps between the start of the recording and the part that counts: the first launches under a profiler are slow."""


class StepTrace:
    """Begins when it is made; `after_step` ends it and answers."""

    def __init__(
        self, tracer: Tracer, times: StepTimes, num_done: int, num_steps: int, answer: Callable[[dict[str, Any]], None]
    ) -> None:
        """
        Args:
            num_done: steps reconciled so far.
            num_steps: steps to trace.
            answer: gets the summary, once.
        """
        self._tracer = tracer
        self._times = times
        self._first = num_done + NUM_SKIPPED
        self._last = self._first + max(1, num_steps)
        self._before: dict[Part, float] | None = None
        self._answer = answer
        tracer.start()
        times.start()

    def after_step(self, num_done: int, has_work: bool) -> bool:
        """Look at what has been done; True at the end. Without work the trace ends early, with the steps it has."""
        if self._before is None and (num_done >= self._first or not has_work):
            self._first = num_done
            self._before = dict(self._times.seconds)
            self._tracer.mark()
        if has_work and num_done < self._last:
            return False
        steps = num_done - self._first
        before = self._before or {}
        # Before the recording is read, which takes long.
        host = {
            part: 1e3 * (seconds - before.get(part, 0.0)) / max(steps, 1)
            for part, seconds in self._times.seconds.items()
        }
        self._answer({**self._tracer.stop(steps), "host_ms_per_step": host})
        self._times.start()
        return True
