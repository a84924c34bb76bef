# SPDX-License-Identifier: Apache-2.0
"""The mirror itself: it holds what the events say, and refuses what cannot be."""

from collections.abc import Callable

import pytest
from event_mirror import EventMirror

from headrace.core.block_hash import chain
from headrace.core.kv_events import Block, EventLog

HASHES = chain(("s",), range(12), 4)


def block(index: int, **place: int) -> Block:
    return Block(HASHES[index], tuple(range(4 * index, 4 * index + 4)), **place)


def test_it_holds_what_the_events_say() -> None:
    log = EventLog(100, 512)
    mirror = EventMirror(log)
    log.created([8])
    log.stored(None, [block(0), block(1)], cache_salt="s")
    mirror.check({HASHES[0]: (0, 35), HASHES[1]: (0, 35)})
    log.stored(HASHES[1], [block(2, priority=90)], cache_salt="s")
    log.updated(HASHES[0], block(1, cache_level=1), old_cache_level=0, old_priority=35, cache_salt="s")
    log.removed([HASHES[0]])
    mirror.check({HASHES[1]: (1, 35), HASHES[2]: (0, 90)})
    with pytest.raises(AssertionError):
        mirror.check({HASHES[1]: (0, 35), HASHES[2]: (0, 90)})


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda log: log.stored(None, [block(0)], cache_salt="s"), "stored twice"),
        (lambda log: log.stored(None, [block(1)], cache_salt="s"), "not the hash"),
        (lambda log: log.stored(HASHES[0], [Block(HASHES[1], (9, 9, 9, 9))], cache_salt="s"), "not the hash"),
        (lambda log: log.removed([HASHES[1]]), "was not there"),
        (lambda log: log.updated(None, block(0), old_cache_level=1, old_priority=35), "was not so before"),
        (lambda log: log.created([8]), "created anew"),
        (lambda log: [(log.removed([HASHES[0]]), log.flush()) for _ in range(9)], "events were lost"),
    ],
)
def test_it_refuses_what_cannot_be(say: Callable[[EventLog], object], words: str) -> None:
    log = EventLog(4, 512)
    mirror = EventMirror(log)
    log.created([8])
    log.stored(None, [block(0)], cache_salt="s")
    mirror.follow()
    say(log)
    with pytest.raises(AssertionError, match=words):
        mirror.follow()
