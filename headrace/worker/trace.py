# SPDX-License-Identifier: Apache-2.0
"""What the device does over some steps, from its own timestamps: how long it worked, how long it had nothing to do.

The profiler's events are summarised here, in the worker, so that plain data goes over the wire. On a GPU an activity is
a kernel or a copy, as the GPU times it; on a CPU it is an operator of torch's on the thread that computes.
"""

import heapq
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headrace.worker.launch_queue import LaunchQueue

LONG_GAP_US = 30.0
"""What no gap between two decode steps should exceed."""
NUM_PLACES = 8
"""Places of gaps, and kernels, that a summary names."""
MAX_NAME = 96


@dataclass(frozen=True, slots=True)
class Activity:
    """Something the device did. Times in nanoseconds of one clock."""

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    """Its duration, less that of what ran inside it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without any activity."""

    before: str
    """The activity that ended last."""
    after: str
    duration_ns: int


class Tracer:
    """Records one device; the recording begins and ends on the thread that launches the device's work."""

    def __init__(self, device_type: str, queue: LaunchQueue) -> None:
        self._device_type = device_type
        self._queue = queue
        self._profile: Any = None
        self._from_ns = 0

    def start(self) -> None:
        """Begin to record. The first time takes a second or more."""
        self._queue.submit(self._start).result()

    def mark(self) -> None:
        """What began before now does not count."""
        self._from_ns = time.time_ns()

    def stop(self, num_steps: int) -> dict[str, Any]:
        """End the recording and say what it holds; waits for what was launched.

        num_steps: steps that ended since `mark`.
        """
        until_ns = time.time_ns()
        spans = self._queue.submit(self._stop).result()
        counted = [span for span in spans if self._from_ns <= span[1] < until_ns]
        # With timestamps of another clock than the host's, all there is counts, the first steps too.
        return summarize(to_activities(counted or spans), num_steps, self._device_type)

    def _start(self) -> None:
        activity = ProfilerActivity.CUDA if self._device_type == "cuda" else ProfilerActivity.CPU
        self._from_ns = 0
        # Its chatter about itself is nobody's.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[activity])
        self._profile.start()

    def _stop(self) -> list[tuple[str, int, int]]:
        recording, self._profile = self._profile, None
        if self._device_type == "cuda":
            torch.cuda.synchronize()
        recording.stop()
        wanted = DeviceType.CUDA if self._device_type == "cuda" else DeviceType.CPU
        # Its timestamps are those of `time.time_ns`.
        return [
            (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in recording.profiler.kineto_results.events()
            if event.device_type() == wanted
        ]


def to_activities(spans: Iterable[tuple[str, int, int]]) -> list[Activity]:
    """(name, start, end) in nanoseconds, in any order -> activities by their start, each with its own time.

    A span inside another is taken out of the outer one's own time; spans of streams that merely overlap are not.
    """
    ordered = sorted(spans, key=lambda span: (span[1], -span[2]))
    own = [end - start for _, start, end in ordered]
    open_spans: list[int] = []
    for index, (_, start, end) in enumerate(ordered):
        while open_spans and ordered[open_spans[-1]][2] <= start:
            open_spans.pop()
        if open_spans and end <= ordered[open_spans[-1]][2]:
            own[open_spans[-1]] -= end - start
        open_spans.append(index)
    return [Activity(name, start, end, own[index]) for index, (name, start, end) in enumerate(ordered)]


def find_gaps(activities: Sequence[Activity]) -> tuple[int, list[Gap]]:
    """Nanoseconds with at least one activity, and the times between with none. activities: by their start."""
    busy, gaps = 0, []
    reached, last = None, ""
    for activity in activities:
        if reached is None:
            reached, last = activity.start_ns, activity.name
        if activity.start_ns > reached:
            gaps.append(Gap(last, activity.name, activity.start_ns - reached))
            reached = activity.start_ns
        if activity.end_ns > reached:
            busy += activity.end_ns - reached
            reached, last = activity.end_ns, activity.name
    return busy, gaps


def summarize(activities: Sequence[Activity], num_steps: int, device: str) -> dict[str, Any]:
    """A trace as plain data: times in milliseconds per step, gaps in microseconds."""
    busy_ns, gaps = find_gaps(activities)
    idle_ns = sum(gap.duration_ns for gap in gaps)
    lengths_us = sorted(gap.duration_ns / 1e3 for gap in gaps)
    steps = max(num_steps, 1)
    span_ns = busy_ns + idle_ns
    return {
        "device": device,
        "num_steps": num_steps,
        "num_activities": len(activities),
        "span_ms": span_ns / 1e6,
        "busy_ms_per_step": busy_ns / 1e6 / steps,
        "idle_ms_per_step": idle_ns / 1e6 / steps,
        "busy_share": busy_ns / span_ns if span_ns else None,
        "gaps": {
            "count": len(gaps),
            "max_us": lengths_us[-1] if lengths_us else 0.0,
            "p99_us": lengths_us[math.ceil(0.99 * len(lengths_us)) - 1] if lengths_us else 0.0,
            "over_us": LONG_GAP_US,
            "num_over": sum(1 for length in lengths_us if length > LONG_GAP_US),
            "places": _places(gaps),
        },
        "kernels": _kernels(activities, steps),
    }


def _places(gaps: Sequence[Gap]) -> list[dict[str, Any]]:
    """Where the device waited longest in all: between which two activities, how often, how long."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for gap in gaps:
        found[(gap.before, gap.after)].append(gap.duration_ns)
    most = heapq.nlargest(NUM_PLACES, found.items(), key=lambda item: sum(item[1]))
    return [
        {
            "before": before[:MAX_NAME],
            "after": after[:MAX_NAME],
            "count": len(lengths),
            "max_us": max(lengths) / 1e3,
            "total_us": sum(lengths) / 1e3,
        }
        for (before, after), lengths in most
    ]


def _kernels(activities: Sequence[Activity], steps: int) -> list[dict[str, Any]]:
    """What took most of the time, by name."""
    total = sum(activity.own_ns for activity in activities)
    found: dict[str, list[int]] = defaultdict(list)
    for activity in activities:
        found[activity.name].append(activity.own_ns)
    most = heapq.nlargest(NUM_PLACES, found.items(), key=lambda item: sum(item[1]))
    return [
        {
            "name": name[:MAX_NAME],
            "count": len(times),
            "us_per_step": sum(times) / 1e3 / steps,
            "mean_us": sum(times) / 1e3 / len(times),
            "share": sum(times) / total if total else 0.0,
        }
        for name, times in most
    ]
