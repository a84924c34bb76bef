# SPDX-License-Identifier: Apache-2.0
"""Records of a level -> its figures, as a report holds them. Times in milliseconds."""

import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.bench.load import Record

PERCENTILES = (50, 90, 95, 99)
NUM_ERRORS = 5
"""Reasons of failure that a report names."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at `share` percent of a sorted sequence, interpolated between neighbours."""
    place = (len(ordered) - 1) * share / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles, least and most of a latency, in milliseconds; None where there is none."""
    ordered = sorted(1e3 * value for value in seconds)
    if not ordered:
        return None
    return {
        "mean": statistics.fmean(ordered),
        **{f"p{share}": percentile(ordered, share) for share in PERCENTILES},
        "min": ordered[0],
        "max": ordered[-1],
    }


def summarize(
    records: Sequence[Record],
    seconds: float,
    *,
    concurrency: int | None,
    is_meant_cold: bool,
    num_gpus: int = 1,
    streaming: bool = True,
) -> dict[str, Any]:
    """The figures of one level.

    Args:
        seconds: that it took.
        concurrency: the most requests in flight; None: no limit.
        is_meant_cold: no prompt token should have come from the cache.
        streaming: the pieces of an answer were timed.
    """
    good = [record for record in records if record.error is None]
    output = sum(record.num_output for record in good)
    prompt = sum(record.num_prompt for record in good)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    latencies = [record.ended - record.started for record in good]
    tpots = [_tpot(record) for record in good if record.num_output > 1 and record.arrivals] if streaming else []
    users = [record.num_output / latency for record, latency in zip(good, latencies, strict=True) if latency > 0]
    values = {
        "concurrency": concurrency,
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "errors": _errors(records),
        "seconds": seconds,
        "mean_in_flight": sum(latencies) * per_second,
        "input_tokens": prompt,
        "output_tokens": output,
        "mean_input_len": prompt / len(good) if good else 0.0,
        "mean_output_len": output / len(good) if good else 0.0,
        "requests_per_s": len(good) * per_second,
        "output_tokens_per_s": output * per_second,
        "total_tokens_per_s": (prompt + output) * per_second,
        "output_tokens_per_s_per_gpu": output * per_second / num_gpus,
        "output_tokens_per_s_per_user": statistics.fmean(users) if users else 0.0,
        "ttft_ms": None,
        "ttft_after_first_ms": None,
        "tpot_ms": None,
        "itl_ms": None,
        "e2e_ms": spread(latencies),
        "cache": _cache(good, is_meant_cold),
    }
    if streaming:
        first = [record.arrivals[0] - record.started for record in good if record.arrivals]
        # Those that found the engine empty came all at once; what follows is the steady state.
        steady = sorted((record for record in good if record.arrivals), key=lambda record: record.started)
        later = steady[concurrency:] if concurrency else []
        values |= {
            "ttft_ms": spread(first),
            "ttft_after_first_ms": spread(record.arrivals[0] - record.started for record in later),
            "tpot_ms": spread(tpots),
            "itl_ms": spread(gap for record in good for gap in _gaps(record)),
        }
    return values


def _tpot(record: Record) -> float:
    """Seconds per output token after the first."""
    return (record.arrivals[-1] - record.arrivals[0]) / (record.num_output - 1)


def _gaps(record: Record) -> list[float]:
    """Seconds between one piece of an answer and the next."""
    return [after - before for before, after in itertools.pairwise(record.arrivals)]


def _errors(records: Sequence[Record]) -> list[dict[str, Any]]:
    found = collections.Counter(record.error for record in records if record.error is not None)
    return [{"error": error, "count": count} for error, count in found.most_common(NUM_ERRORS)]


def _cache(good: Sequence[Record], is_meant_cold: bool) -> dict[str, Any]:
    """The share of prompt tokens that came from the prefix cache; None where the server does not say."""
    said = [record for record in good if record.num_cached is not None]
    prompt = sum(record.num_prompt for record in said)
    cached = sum(record.num_cached or 0 for record in said)
    share = cached / prompt if prompt else None
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached if said else None,
        "share": share,
        "is_meant_cold": is_meant_cold,
        "is_as_meant": None if share is None else not (is_meant_cold and cached > 0),
    }
