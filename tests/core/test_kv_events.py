# SPDX-License-Identifier: Apache-2.0
"""The event log: what becomes one event, what readers get, and what they are told when they come late."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.cache import KvCacheConfig
from headrace.core.block_hash import as_int, chain
from headrace.core.kv_events import MAX_BLOCKS_PER_PAGE, Block, Event, EventLog, EventPage, Removed, Stored, to_dict
from headrace.errors import RequestError

SIZE = 4
HASHES = chain((None,), range(40), SIZE)


def block(index: int, **where: int) -> Block:
    return Block(HASHES[index], tuple(range(index * SIZE, (index + 1) * SIZE)), **where)


def log_with(capacity: int, num_events: int = 0) -> EventLog:
    """A log with so many events, removals of one block each."""
    log = EventLog(capacity, 512)
    for number in range(num_events):
        log.removed([number.to_bytes(32, "big")])
        log.flush()
    return log


def all_of(log: EventLog) -> list[Event]:
    return log.read(0, 1000).events


def test_the_schema_is_tensorrt_llms() -> None:
    log = EventLog(100, 512)
    log.created([64, 128])
    log.stored(None, [block(0), block(1, priority=90)], cache_salt="s", lora_name="a")
    log.updated(HASHES[0], block(1, cache_level=1, priority=35), old_cache_level=0, old_priority=90)
    log.updated(HASHES[0], block(1, cache_level=1), old_cache_level=0, old_priority=35)
    log.removed(HASHES[:2], window_size=128)
    shown = json.loads(json.dumps([to_dict(event) for event in all_of(log)]))
    numbers = [as_int(each) for each in HASHES[:2]]
    tokens = [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in range(8)]
    both = {"type": "stored_block", "cache_level": 0, "mm_keys": [], "cache_salt": "s", "lora_name": "a"}
    blocks = [
        {**both, "block_hash": numbers[0], "tokens": tokens[:4], "priority": 35},
        {**both, "block_hash": numbers[1], "tokens": tokens[4:], "priority": 90},
    ]
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    priority = {"type": "event_diff", "old_value": 90, "new_value": 35}
    updated = {"type": "updated", "block_hash": numbers[1], "cache_level": level}
    assert shown == [
        {"event_id": 0, "window_size": 512, "data": {"type": "created", "num_blocks_per_cache_level": [64, 128]}},
        {"event_id": 1, "window_size": 512, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}},
        {"event_id": 2, "window_size": 512, "data": {**updated, "priority": priority}},
        {"event_id": 3, "window_size": 512, "data": {**updated, "priority": None}},
        {"event_id": 4, "window_size": 128, "data": {"type": "removed", "block_hashes": numbers}},
    ]


def test_a_step_says_of_one_sequence_what_it_stored_in_one_event() -> None:
    log = EventLog(100, 512)
    log.stored(None, [block(0)])
    log.stored(HASHES[0], [block(1)])
    log.stored(HASHES[1], [block(2), block(3)])
    log.stored(HASHES[1], [block(2)])  # Of another sequence: it does not go on from the last block.
    log.stored(HASHES[2], [block(3)], cache_salt="s")
    log.stored(HASHES[3], [block(4)])
    log.stored(HASHES[4], [block(5)], window_size=128)
    log.removed([HASHES[0]])
    log.removed([HASHES[1], HASHES[2]])
    log.stored(HASHES[2], [block(3)])
    log.removed([HASHES[3]])
    log.flush()
    log.removed([HASHES[4]])  # Of another step.
    log.stored(None, [])
    log.removed([])
    found = [
        [each.block_hash for each in event.blocks] if isinstance(event, Stored) else event.block_hashes
        for event in all_of(log)
        if isinstance(event, Stored | Removed)
    ]
    assert found == [
        HASHES[:4], [HASHES[2]], [HASHES[3]], [HASHES[4]], [HASHES[5]],
        HASHES[:3], [HASHES[3]], [HASHES[3]], [HASHES[4]],
    ]  # fmt: skip


def test_the_lists_of_the_caller_stay_as_they_are() -> None:
    log = EventLog(100, 512)
    mine, gone = [block(0)], [HASHES[5]]
    log.stored(None, mine)
    log.stored(HASHES[0], [block(1)])
    log.removed(gone)
    log.removed([HASHES[6]])
    assert mine == [block(0)] and gone == [HASHES[5]]


def test_an_update_of_nothing_is_no_event() -> None:
    log = EventLog(100, 512)
    log.updated(None, block(0, cache_level=1, priority=7), old_cache_level=1, old_priority=7)
    assert all_of(log) == []


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=12), st.integers(1, 5), st.integers(0, 200))
def test_a_reader_gets_every_event_once_or_is_told_how_many_it_missed(
    capacity: int, batches: list[int], limit: int, since: int
) -> None:
    log = EventLog(capacity, 512)
    cursor = num_lost = 0
    seen: list[int] = []
    for size in batches:
        for number in range(size):
            # Two kinds in turn, so that none of them become one.
            log.stored(None, [block(0)]) if number % 2 else log.removed([HASHES[0]])
        log.flush()
        page = log.read(cursor, limit)
        cursor, num_lost = page.next, num_lost + page.lost
        seen += [event.event_id for event in page.events]
    assert log.num_events == sum(batches)
    while (page := log.read(cursor, limit)).next != log.num_events or page.events:
        cursor, num_lost = page.next, num_lost + page.lost
        seen += [event.event_id for event in page.events]
    assert seen == sorted(set(seen)) and len(seen) + num_lost == log.num_events
    kept = min(capacity, log.num_events)
    if since <= log.num_events:
        first = max(since, log.num_events - kept)
        whole = log.read(since, 1000)
        assert [event.event_id for event in whole.events] == list(range(first, log.num_events))
        assert (whole.lost, whole.next) == (first - since, log.num_events)
    else:
        with pytest.raises(RequestError, match=f"since = {since} "):
            log.read(since, 1)


def test_reading_consumes_nothing() -> None:
    log = log_with(8, 5)
    assert log.read(2, 10) == log.read(2, 10)
    assert [event.event_id for event in log.read(2, 10).events] == [2, 3, 4]
    assert log.read(2, 10).log_id == log.log_id != log_with(8).log_id


def test_a_page_of_large_events_ends_early_and_says_where_to_go_on() -> None:
    log = EventLog(100, 512)
    for _ in range(5):
        log.stored(None, [block(0)] * (MAX_BLOCKS_PER_PAGE // 2 + 1))
        log.flush()
    first = log.read(0, 100)
    assert (len(first.events), first.next, first.lost) == (2, 2, 0)
    assert [event.event_id for event in log.read(first.next, 100).events] == [2, 3]


@pytest.mark.parametrize(
    ("since", "limit", "param", "words"),
    [
        (-1, 10, "since", "since = -1 is no event's id: they go from 0 to 3"),
        (4, 10, "since", "After a restart they begin at 0 again"),
        (0, 0, "limit", "limit must be from 1 to 10000, but is 0"),
        (0, 10_001, "limit", "but is 10001"),
    ],
)
def test_a_bad_cursor_is_one_clear_sentence(since: int, limit: int, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        log_with(8, 3).read(since, limit)
    assert caught.value.param == param


def test_without_a_buffer_a_reader_is_told_what_to_set() -> None:
    log = log_with(0, 3)
    with pytest.raises(RequestError, match="event_buffer_max_size is 0; set it"):
        log.read(0, 10)


def test_the_sink_gets_each_step_once_and_whole() -> None:
    batches: list[list[Event]] = []
    log = EventLog(2, 512, sink=batches.append)
    for _ in range(3):
        log.stored(None, [block(0)])
        log.removed([HASHES[0]])
        log.stored(None, [block(1)])
        log.flush()
        log.flush()
    assert [[event.event_id for event in batch] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_page_crosses_to_the_front_end() -> None:
    log = EventLog(100, 512)
    log.created([64])
    log.stored(None, [block(0)], cache_salt="s")
    log.updated(None, block(0, cache_level=1), old_cache_level=0, old_priority=35)
    log.removed(HASHES[:2])
    page = log.read(0, 10)
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(page), type=EventPage)
    assert [to_dict(event) for event in crossed.events] == [to_dict(event) for event in page.events]
    assert (crossed.next, crossed.lost, crossed.log_id) == (4, 0, log.log_id)


def test_there_is_a_log_only_where_somebody_wants_events() -> None:
    assert EventLog.from_config(KvCacheConfig(), 512) is None
    kept = EventLog.from_config(KvCacheConfig(event_buffer_max_size=7), 512)
    assert kept is not None and (kept.capacity, kept.window_size) == (7, 512)
    stream = {"enable_kv_cache_events": True}
    assert EventLog.from_config(KvCacheConfig(kv_events_config=stream), 512) is not None
    assert EventLog.from_config(KvCacheConfig(kv_events_config={**stream, "publisher": "null"}), 512) is None


def test_it_costs_little() -> None:
    """A step in which each of 256 sequences stores a block, and as many are removed."""
    log = EventLog(100_000, 512)
    parents = [bytes([i]) * 32 for i in range(256)]
    token_ids = tuple(range(32))
    took = []
    for _ in range(50):
        started = time.perf_counter()
        for parent in parents:
            log.stored(parent, [Block(HASHES[0], token_ids)])
            log.removed([parent])
        log.flush()
        took.append(time.perf_counter() - started)
    assert min(took) < 0.002, f"{min(took) * 1e6:.0f} us"
