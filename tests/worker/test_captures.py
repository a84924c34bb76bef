# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph that cannot be captured costs its size, never the engine; on a stand-in for CUDA's own capturing."""

import logging
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from stand_in import Bench, StandIn

from headrace.worker import model_runner
from headrace.worker.graph_pool import Graph
from headrace.worker.padded_steps import MAX_FAILED

GIVEN = {"a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "b": [2, 7], "c": [9, 9, 1]}


class Replayed:
    """Runs the call anew, as a graph does on what lies at its addresses."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call


class Pool:
    """Captures all but the calls whose numbers are in `failing`."""

    failing: frozenset[int] = frozenset()
    made: ClassVar[list["Pool"]] = []

    def __init__(self) -> None:
        self.num_bytes = self.num_calls = 0
        self.made.append(self)

    def capture(self, call: Callable[[], None]) -> Graph:
        self.num_calls += 1
        if self.num_calls in self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nMore lines.")
        self.num_bytes += 1 << 20
        return Replayed(call)


def bench(monkeypatch: pytest.MonkeyPatch, failing: set[int]) -> Bench:
    monkeypatch.setattr(model_runner, "GraphPool", Pool)
    monkeypatch.setattr(Pool, "failing", frozenset(failing))
    monkeypatch.setattr(Pool, "made", [])
    return Bench(StandIn(), is_padded=True, captures=True)


def capture_all(made: Bench) -> int:
    count = 0
    with torch.inference_mode():
        while made.runner.capture_next():
            count += 1
    return count


@pytest.mark.parametrize("failing", [set(), {1}, {2, 5}, {3, 4, 6, 7, 9}], ids=str)
def test_what_cannot_be_captured_is_served_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: set[int]
) -> None:
    made = bench(monkeypatch, failing)
    with caplog.at_level(logging.INFO, "headrace.worker.padded_steps"):
        # Three decode sizes with a head and a sampler each, and four of mixed steps.
        assert capture_all(made) == 13
    (pool,) = Pool.made
    said = [text for text in caplog.messages if "No CUDA graph" in text]
    assert len(said) == len(failing) and all("CUDA out of memory" in text and "\n" not in text for text in said)
    (done,) = [text for text in caplog.messages if text.startswith("CUDA graphs:")]
    assert f"{13 - len(failing)} are captured" in done and pool.num_bytes == 13 - len(failing) << 20
    for name, prompt in GIVEN.items():
        made.add(name, prompt)
    assert made.run() == {name: StandIn().greedy(prompt, 8) for name, prompt in GIVEN.items()}


def test_after_some_failures_in_a_row_the_rest_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = bench(monkeypatch, set(range(4, 14)))
    with caplog.at_level(logging.WARNING, "headrace.worker.padded_steps"):
        assert capture_all(made) == 3 + MAX_FAILED
    assert Pool.made[0].num_calls == 3 + MAX_FAILED
    assert "7 CUDA graphs are left out" in caplog.messages[-1]
    for name, prompt in GIVEN.items():
        made.add(name, prompt)
    assert made.run() == {name: StandIn().greedy(prompt, 8) for name, prompt in GIVEN.items()}
