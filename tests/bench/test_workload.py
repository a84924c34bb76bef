# SPDX-License-Identifier: Apache-2.0
"""Synthetic requests: their lengths, what they share and what they must not, and when they arrive."""

import itertools
import statistics

import pytest

from headrace.bench.arrivals import arrival_times, check_arrivals
from headrace.bench.dataset import BenchRequest
from headrace.bench.plan import Levels, Workload
from headrace.bench.workload import Lengths, multi_turn, random_requests, shared_prefix, take, units_of
from headrace.errors import ConfigError

BLOCK = 32


def prefixes(requests: list[BenchRequest], length: int = BLOCK) -> list[tuple[int, ...]]:
    return [(request.input_ids or ())[:length] for request in requests]


def test_a_normal_distribution_has_its_mean_and_deviation() -> None:
    requests = random_requests(2000, Lengths(500, 50), Lengths(100, 10), 32_000, seed=1)
    inputs = [len(request.input_ids or ()) for request in requests]
    outputs = [request.output_tokens for request in requests]
    assert statistics.fmean(inputs) == pytest.approx(500, abs=5)
    assert statistics.stdev(inputs) == pytest.approx(50, abs=5)
    assert statistics.fmean(outputs) == pytest.approx(100, abs=2)


def test_without_a_deviation_all_lengths_are_the_mean_and_none_is_under_1() -> None:
    requests = random_requests(50, Lengths(7), Lengths(1, 50), 100, seed=1)
    assert {len(request.input_ids or ()) for request in requests} == {7}
    assert min(request.output_tokens for request in requests) == 1


def test_an_even_distribution_reaches_both_bounds_and_goes_past_neither() -> None:
    requests = random_requests(500, Lengths.between(3, 6), Lengths.between(1, 2), 100, seed=2)
    assert {len(request.input_ids or ()) for request in requests} == {3, 4, 5, 6}
    assert {request.output_tokens for request in requests} == {1, 2}


def test_random_requests_share_no_block_and_repeat_with_their_seed_only() -> None:
    first = random_requests(64, Lengths(64), Lengths(1), 32_000, seed=3)
    again = random_requests(64, Lengths(64), Lengths(1), 32_000, seed=3)
    other = random_requests(64, Lengths(64), Lengths(1), 32_000, seed=4)
    assert first == again
    assert len({*prefixes(first), *prefixes(other)}) == 128
    assert all(0 <= token < 32_000 for request in first for token in request.input_ids or ())


def test_levels_of_a_run_share_no_prompts_and_neither_do_runs_of_another_offset() -> None:
    workload = Workload(num_requests=16, input_len=64, output_len=1)
    here, there = (Levels(workload, None, "cpu", 32_000, offset) for offset in (0, 100))
    seen = [prefix for levels in (here, there) for i in range(3) for prefix in prefixes(levels.requests(i, 4))]
    assert len(set(seen)) == 2 * 3 * 16


def test_levels_of_a_file_share_no_prompts_unless_the_cache_may_be_warm() -> None:
    given = random_requests(8, Lengths(64), Lengths(1), 32_000, seed=5)
    cold = Levels(Workload(dataset="f", num_requests=4), given, "cpu", 32_000)
    assert cold.requests(0, None) == given[:4]
    assert not set(prefixes(cold.requests(1, None))) & set(prefixes(given))
    warm = Levels(Workload(dataset="f", warm_cache=True), given, "cpu", 32_000)
    assert warm.requests(1, None) == given


def test_the_default_number_of_requests_follows_the_concurrency() -> None:
    levels = Levels(Workload(input_len=1, output_len=1), None, "cpu", 10)
    assert [len(levels.requests(i, concurrency)) for i, concurrency in enumerate((1, 8, None))] == [8, 32, 8]


def test_no_request_of_a_file_runs_twice() -> None:
    with pytest.raises(ConfigError, match=r"num_requests \(9\) is more than dataset f holds \(8\); use at most 8"):
        take([BenchRequest(i, 1, (1,)) for i in range(8)], 9, "dataset f")


def test_a_group_shares_its_prefix_and_no_more() -> None:
    requests = shared_prefix(6, 2, 64, Lengths(32), Lengths(4), 32_000, seed=1)
    assert len(set(prefixes(requests, 64))) == 2
    assert len(set(prefixes(requests, 96))) == 6
    assert prefixes(requests, 64)[0] == prefixes(requests, 64)[2] != prefixes(requests, 64)[1]
    assert all(request.is_warm and len(request.input_ids or ()) == 96 for request in requests)
    assert not Workload().is_meant_cold(requests)


def test_a_turn_begins_with_the_whole_turn_before_it() -> None:
    requests = multi_turn(3, 4, Lengths(10), Lengths(5), 32_000, seed=1)
    assert [request.conversation for request in requests[:4]] == ["0", "1", "2", "0"]
    units = units_of(requests)
    assert [len(unit) for unit in units] == [4, 4, 4]
    for unit in units:
        for before, after in itertools.pairwise(unit):
            old, new = before.input_ids or (), after.input_ids or ()
            assert new[: len(old)] == old and len(new) == len(old) + 5 + 10


def test_requests_without_a_conversation_are_units_by_themselves() -> None:
    plain = [BenchRequest(0, 1, (1,)), BenchRequest(1, 1, (1,), conversation="a"), BenchRequest(1, 1, (1,))]
    assert [len(unit) for unit in units_of([*plain, plain[1]])] == [1, 2, 1]


def test_a_poisson_process_has_its_rate_and_its_spread() -> None:
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        times = arrival_times(20_000, 50.0, burstiness, seed=1)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
        assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1)
    assert arrival_times(3, None) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness", "said"),
    [
        (0.0, 1.0, "request_rate must be over 0, but is 0"),
        (1.0, 0.0, "burstiness must be over 0, but is 0; 1 is Poisson"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(rate: float, burstiness: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_arrivals(rate, burstiness)
