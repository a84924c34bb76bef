# SPDX-License-Identifier: Apache-2.0
"""Traces: the arithmetic on made-up timestamps, and a real recording on the CPU."""

import time

import pytest
import torch

from headrace.worker.launch_queue import InlineQueue, ThreadQueue
from headrace.worker.trace import Activity, Gap, Tracer, find_gaps, summarize, to_activities

US = 1000


def spans(*each: tuple[str, int, int]) -> list[Activity]:
    """(name, start, end) in microseconds."""
    return to_activities([(name, start * US, end * US) for name, start, end in each])


def test_gaps_are_where_nothing_runs_on_any_stream() -> None:
    # Two streams overlap from 5 to 10; the long one ends after the short ones that began later.
    busy, gaps = find_gaps(spans(("a", 0, 10), ("b", 5, 8), ("c", 12, 20), ("d", 15, 30), ("e", 100, 110)))
    assert busy == 38 * US
    assert gaps == [Gap("a", "c", 2 * US), Gap("d", "e", 70 * US)]


def test_activities_that_touch_leave_no_gap() -> None:
    assert find_gaps(spans(("a", 0, 10), ("b", 10, 20))) == (20 * US, [])
    assert find_gaps([]) == (0, [])


def test_what_runs_inside_another_is_taken_out_of_its_own_time() -> None:
    outer, inner, innermost, after = spans(("linear", 0, 100), ("addmm", 10, 60), ("copy", 20, 30), ("next", 100, 110))
    assert [a.own_ns // US for a in (outer, inner, innermost, after)] == [50, 40, 10, 10]
    # On another stream: it overlaps, and is nobody's part.
    first, second = spans(("a", 0, 10), ("b", 5, 15))
    assert (first.own_ns, second.own_ns) == (10 * US, 10 * US)


def test_the_order_of_events_does_not_matter() -> None:
    events = [("b", 50, 60), ("a", 0, 10), ("c", 55, 58)]
    assert to_activities(events) == to_activities(reversed(events))


def test_a_summary_is_per_step_and_names_the_places() -> None:
    trace = summarize(spans(("a", 0, 40), ("b", 42, 100), ("a", 150, 190), ("b", 192, 250), ("a", 290, 300)), 2, "cuda")
    assert trace["num_activities"] == 5 and trace["span_ms"] == pytest.approx(0.3)
    assert trace["busy_ms_per_step"] == pytest.approx(0.103)
    assert trace["idle_ms_per_step"] == pytest.approx(0.047)
    assert trace["busy_share"] == pytest.approx(206 / 300)
    gaps = trace["gaps"]
    assert (gaps["count"], gaps["max_us"], gaps["num_over"], gaps["over_us"]) == (4, 50.0, 2, 30.0)
    assert gaps["places"][0] == {"before": "b", "after": "a", "count": 2, "max_us": 50.0, "total_us": 90.0}
    assert trace["kernels"][0] == {
        "name": "b", "count": 2, "us_per_step": 58.0, "mean_us": 58.0, "share": pytest.approx(116 / 206),
    }  # fmt: skip


def test_p99_of_many_gaps_passes_over_the_one_in_a_hundred() -> None:
    each = [(str(i), 10 * i, 10 * i + 9) for i in range(100)]
    late = [*each, ("late", 2000, 2001)]
    gaps = summarize(spans(*late), 1, "cuda")["gaps"]
    assert (gaps["count"], gaps["p99_us"], gaps["max_us"]) == (100, 1.0, 2000 - 999)


def test_a_trace_of_nothing_is_empty() -> None:
    trace = summarize([], 0, "cuda")
    assert trace["busy_share"] is None and trace["gaps"]["max_us"] == 0.0 and trace["kernels"] == []


def test_timestamps_of_another_clock_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer("cuda", InlineQueue())
    monkeypatch.setattr(tracer, "_stop", lambda: [("a", 5, 9), ("b", 20, 30)])
    tracer.mark()
    assert tracer.stop(1)["num_activities"] == 2


def test_a_recording_holds_what_began_after_the_mark() -> None:
    queue = ThreadQueue(1)
    tracer = Tracer("cpu", queue)
    x = torch.rand(64, 64)

    def work() -> None:
        x.exp()
        time.sleep(0.01)
        x.mm(x)

    try:
        for _ in range(2):
            tracer.start()
            queue.submit(lambda: x.sin())
            queue.submit(lambda: None).result()
            tracer.mark()
            queue.submit(work).result()
            trace = tracer.stop(1)
            names = {entry["name"] for entry in trace["kernels"]}
            assert "aten::mm" in names and "aten::exp" in names and "aten::sin" not in names
            assert trace["device"] == "cpu"
            assert 9_000 < trace["gaps"]["max_us"] < 500_000
            (place,) = [p for p in trace["gaps"]["places"] if p["max_us"] == trace["gaps"]["max_us"]]
            assert place["before"].startswith("aten::exp") and place["after"].startswith("aten::mm")
    finally:
        queue.close()
