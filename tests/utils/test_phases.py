# SPDX-License-Identifier: Apache-2.0
"""Phases sum to the whole, whoever measured them."""

import subprocess
import sys
import time

import pytest

from headrace.utils.phases import Phases, process_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("headrace.utils.phases.time.monotonic", lambda: now[0])
    return now


def test_phases_of_two_processes_sum_to_the_time_that_passed(clock: list[float]) -> None:
    mine = Phases(97.0)
    mine.end_of("imports")
    clock[0] += 1.5
    mine.end_of("files")
    clock[0] += 6.0
    mine.add({"process": 1.0, "weights": 4.0})
    mine.end_of("connecting")
    clock[0] += 1.0
    mine.end_of("files")
    assert mine.seconds == {"imports": 3.0, "files": 2.5, "process": 1.0, "weights": 4.0, "connecting": 1.0}
    assert sum(mine.seconds.values()) == clock[0] - 97.0
    lines = mine.lines("start")
    assert len(lines) == 7 and lines[0].split() == ["start", "seconds"] and lines[-1].split() == ["=", "total", "11.50"]
    assert [line.rsplit(None, 1)[0].strip() for line in lines[1:-1]] == list(mine.seconds)


def test_a_process_knows_when_it_began() -> None:
    code = "import time; time.sleep(0.3); from headrace.utils.phases import process_began; print(process_began())"
    before = time.monotonic()
    began = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    # Ticks are 10 ms.
    assert before - 0.05 <= began <= time.monotonic() - 0.3
    assert process_began() < before
