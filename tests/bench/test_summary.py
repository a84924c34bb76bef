# SPDX-License-Identifier: Apache-2.0
"""Figures of a level, against ones worked out by hand."""

import pytest

from headrace.bench.dataset import BenchRequest
from headrace.bench.load import Record
from headrace.bench.summary import percentile, spread, summarize


def record(started: float, *arrivals: float, prompt: int = 10, output: int | None = None, **fields: object) -> Record:
    made = Record(
        BenchRequest(0, len(arrivals), (1,) * prompt), started, list(arrivals), arrivals[-1] if arrivals else started
    )
    made.num_prompt, made.num_output, made.num_cached = prompt, len(arrivals) if output is None else output, 0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(101)), 99) == 99


def test_a_spread_is_in_milliseconds() -> None:
    values = spread([0.003, 0.001, 0.002])
    assert values is not None
    assert (values["mean"], values["p50"], values["min"], values["max"]) == pytest.approx((2.0, 2.0, 1.0, 3.0))
    assert spread([]) is None


def test_the_figures_of_two_requests() -> None:
    # The first: TTFT 0.5, then gaps of 0.1, 0.1, 0.3 over four tokens. The second: TTFT 1, one gap of 0.5.
    records = [record(0.0, 0.5, 0.6, 0.7, 1.0), record(1.0, 2.0, 2.5, prompt=30)]
    level = summarize(records, 2.5, concurrency=1, is_meant_cold=True, num_gpus=2)
    assert level["requests_per_s"] == pytest.approx(0.8)
    assert level["output_tokens_per_s"] == pytest.approx(6 / 2.5)
    assert level["total_tokens_per_s"] == pytest.approx(46 / 2.5)
    assert level["output_tokens_per_s_per_gpu"] == pytest.approx(3 / 2.5)
    assert level["output_tokens_per_s_per_user"] == pytest.approx((4 / 1.0 + 2 / 1.5) / 2)
    assert level["mean_in_flight"] == pytest.approx((1.0 + 1.5) / 2.5)
    assert (level["mean_input_len"], level["mean_output_len"]) == (20, 3)
    assert level["ttft_ms"]["mean"] == pytest.approx(750)
    assert level["tpot_ms"]["mean"] == pytest.approx((500 / 3 + 500) / 2)
    assert level["itl_ms"]["mean"] == pytest.approx((100 + 100 + 300 + 500) / 4)
    assert level["itl_ms"]["max"] == pytest.approx(500)
    assert level["e2e_ms"]["p50"] == pytest.approx(1250)
    # The one that came first found the engine empty.
    assert level["ttft_after_first_ms"]["mean"] == pytest.approx(1000)


def test_a_piece_of_several_tokens_counts_all_of_them_for_tpot() -> None:
    level = summarize([record(0.0, 1.0, 1.4, 1.8, output=9)], 2.0, concurrency=None, is_meant_cold=True)
    assert level["tpot_ms"]["mean"] == pytest.approx(100)
    assert level["itl_ms"]["mean"] == pytest.approx(400)
    assert level["ttft_after_first_ms"] is None


def test_without_streaming_there_are_only_whole_answers() -> None:
    made = record(0.0, output=5, ended=2.0)
    level = summarize([made], 2.0, concurrency=1, is_meant_cold=True, streaming=False)
    assert level["ttft_ms"] is level["tpot_ms"] is level["itl_ms"] is None
    assert level["e2e_ms"]["mean"] == 2000


@pytest.mark.parametrize(
    ("cached", "is_meant_cold", "share", "is_as_meant"),
    [(0, True, 0.0, True), (5, True, 0.25, False), (5, False, 0.25, True), (None, True, None, None)],
)
def test_a_cold_run_that_was_not_is_told(
    cached: int | None, is_meant_cold: bool, share: float | None, is_as_meant: bool | None
) -> None:
    level = summarize(
        [record(0.0, 1.0, num_cached=cached), record(0.0, 1.0, num_cached=None if cached is None else 0)],
        1.0,
        concurrency=2,
        is_meant_cold=is_meant_cold,
    )
    assert level["cache"]["share"] == share
    assert level["cache"]["is_as_meant"] is is_as_meant


def test_failed_requests_are_counted_by_their_reason_and_in_nothing_else() -> None:
    records = [record(0.0, 1.0), record(0.0, error="no"), record(0.0, 9.0, error="no"), record(0.0, error="other")]
    level = summarize(records, 1.0, concurrency=4, is_meant_cold=True)
    assert (level["num_requests"], level["num_failed"]) == (4, 3)
    assert level["errors"] == [{"error": "no", "count": 2}, {"error": "other", "count": 1}]
    assert level["output_tokens"] == 1 and level["ttft_ms"]["max"] == 1000
    nothing = summarize(records[1:2], 1.0, concurrency=4, is_meant_cold=True)
    assert nothing["output_tokens_per_s"] == 0 and nothing["ttft_ms"] is None
