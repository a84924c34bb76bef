# SPDX-License-Identifier: Apache-2.0
"""Full collections wait for idle time."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.engine.garbage import STEPS_BETWEEN, IdleCollector


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_a_full_collection_comes_in_idle_time_and_only_after_enough_steps() -> None:
    collector = IdleCollector()
    knot = Knot()
    seen = weakref.ref(knot)
    # Old enough that only a full collection looks at it.
    gc.collect(1)
    gc.collect(1)
    del knot
    gc.collect(1)
    collector.when_idle(STEPS_BETWEEN - 1)
    assert seen() is not None
    collector.when_idle(STEPS_BETWEEN)
    assert seen() is None


def test_work_alone_never_starts_a_full_collection() -> None:
    IdleCollector()
    num_full = gc.get_stats()[2]["collections"]
    for _ in range(20):
        kept = [[i] for i in range(20_000)]
    assert len(kept) == 20_000
    assert gc.get_stats()[2]["collections"] == num_full
