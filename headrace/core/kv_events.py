# SPDX-License-Identifier: Apache-2.0
"""What happens to cached KV blocks, as numbered events that any number of readers follow.

The cache says what it does (`created`, `stored`, `removed`, `updated`); the loop calls `flush` once a step. Events lie
in a ring of `event_buffer_max_size`, which each reader walks with a cursor of its own, and go to a `sink`, the push
stream. What costs something, spelling them out, is left to the readers: `to_dict` gives TensorRT-LLM's schema.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.config.cache import KvCacheConfig
from headrace.core.block_hash import as_int
from headrace.core.retention import DEFAULT_PRIORITY
from headrace.errors import RequestError

MAX_EVENTS_PER_PAGE = 10_000
MAX_BLOCKS_PER_PAGE = 2_048
"""A page ends with the event that brings it here, so that reading holds up a step by two milliseconds at most."""
NOT_KEPT = (
    "KV cache events are not kept: kv_cache_config.event_buffer_max_size is 0; set it to the number of events that "
    "readers may be behind, such as 100000."
)


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block, and where it lies."""

    block_hash: bytes
    token_ids: Sequence[int]
    cache_level: int = 0
    """0 device, 1 host, 2 disk."""
    priority: int = DEFAULT_PRIORITY


class KvEvent(msgspec.Struct, array_like=True, tag=True):
    """What all events have. Never changed once it is flushed."""

    event_id: int
    window_size: int
    """Attention window of the layers whose blocks these are; full attention: the longest sequence."""


class Created(KvEvent):
    """The first event: the cache is there, and empty."""

    num_blocks_per_cache_level: list[int]


class Stored(KvEvent):
    """Blocks that can be found from now on, each one the child of the block before it."""

    parent_hash: bytes | None
    """Of the first of them; None: it begins a sequence."""
    blocks: list[Block]
    cache_salt: str | None
    lora_name: str | None


class Removed(KvEvent):
    """Blocks that are gone, from every level."""

    block_hashes: list[bytes]


class Updated(KvEvent):
    """A block that moved to another level, or has another priority now."""

    parent_hash: bytes | None
    block: Block
    old_cache_level: int
    old_priority: int
    cache_salt: str | None
    lora_name: str | None


Event = Created | Stored | Removed | Updated
Sink = Callable[[list[Event]], None]


class EventPage(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one read."""

    events: list[Event]
    next: int
    """The id to read from next."""
    lost: int
    """Events from the one asked for on that were overwritten before this read."""
    log_id: str
    """Of this life of the engine: in another one, ids begin at 0 again."""


class EventLog:
    """Collects a step's events, then numbers and keeps them. Belongs to the core's thread."""

    def __init__(self, capacity: int, window_size: int, sink: Sink | None = None) -> None:
        """
        Args:
            capacity: events that are kept for readers.
            window_size: of events that name none.
            sink: given every event, a step at a time; it must not wait, and not change them.
        """
        self.capacity = capacity
        self.window_size = window_size
        self.sink = sink
        self.log_id = uuid.uuid4().hex
        self.num_events = 0
        """Events so far: the id of the next one."""
        self._ring: list[Event] = []
        self._pending: list[Event] = []

    @classmethod
    def from_config(cls, config: KvCacheConfig, window_size: int, sink: Sink | None = None) -> "EventLog | None":
        """The log that the settings ask for; None where nobody wants events."""
        if not config.event_buffer_max_size and not config.pushes_events:
            return None
        return cls(config.event_buffer_max_size, window_size, sink)

    # What the cache says

    def created(self, num_blocks_per_cache_level: Sequence[int], *, window_size: int | None = None) -> None:
        """The cache is there: blocks of the device, the host, the disk."""
        self._pending.append(Created(0, window_size or self.window_size, list(num_blocks_per_cache_level)))

    def stored(
        self,
        parent_hash: bytes | None,
        blocks: Sequence[Block],
        *,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        window_size: int | None = None,
    ) -> None:
        """Blocks can be found, the first one after `parent_hash` (None: at the root), each next one after the last.

        What goes on where the step's last event ended becomes part of it.
        """
        if not blocks:
            return
        window = window_size or self.window_size
        last = self._pending[-1] if self._pending else None
        if (
            type(last) is Stored
            and last.blocks[-1].block_hash == parent_hash
            and last.window_size == window
            and last.cache_salt == cache_salt
            and last.lora_name == lora_name
        ):
            last.blocks += blocks
        else:
            self._pending.append(Stored(0, window, parent_hash, list(blocks), cache_salt, lora_name))

    def removed(self, block_hashes: Sequence[bytes], *, window_size: int | None = None) -> None:
        """Blocks are gone from every level."""
        if not block_hashes:
            return
        window = window_size or self.window_size
        last = self._pending[-1] if self._pending else None
        if type(last) is Removed and last.window_size == window:
            last.block_hashes += block_hashes
        else:
            self._pending.append(Removed(0, window, list(block_hashes)))

    def updated(
        self,
        parent_hash: bytes | None,
        block: Block,
        *,
        old_cache_level: int,
        old_priority: int,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        window_size: int | None = None,
    ) -> None:
        """`block` is as it is now, and was on another level or had another priority; no event where neither is so."""
        if (block.cache_level, block.priority) == (old_cache_level, old_priority):
            return
        window = window_size or self.window_size
        event = Updated(0, window, parent_hash, block, old_cache_level, old_priority, cache_salt, lora_name)
        self._pending.append(event)

    # What the loop and readers do

    def flush(self) -> None:
        """Number and keep what has come since the last time: the end of a step."""
        events = self._pending
        if not events:
            return
        self._pending = []
        for event_id, event in enumerate(events, self.num_events):
            event.event_id = event_id
        if self.capacity:
            ring, capacity = self._ring, self.capacity
            for event in events:
                # Ids have no gaps, so an event's place follows from its id, before the ring is full and after.
                if len(ring) < capacity:
                    ring.append(event)
                else:
                    ring[event.event_id % capacity] = event
        self.num_events += len(events)
        if self.sink is not None:
            self.sink(events)

    def read(self, since: int, limit: int) -> EventPage:
        """Up to `limit` events from the one with id `since` on. Reading consumes nothing.

        Raises:
            RequestError: events are not kept, or `since` has not been reached.
        """
        self.flush()
        if not self.capacity:
            raise RequestError(NOT_KEPT)
        if not 1 <= limit <= MAX_EVENTS_PER_PAGE:
            raise RequestError(f"limit must be from 1 to {MAX_EVENTS_PER_PAGE}, but is {limit}.", param="limit")
        if not 0 <= since <= self.num_events:
            raise RequestError(
                f"since = {since} is no event's id: they go from 0 to {self.num_events}, the next one's. After a "
                "restart they begin at 0 again.",
                param="since",
            )
        first = max(since, self.num_events - self.capacity)
        events: list[Event] = []
        num_blocks = 0
        for event_id in range(first, min(first + limit, self.num_events)):
            event = self._ring[event_id % self.capacity]
            events.append(event)
            num_blocks += len(event.blocks) if isinstance(event, Stored) else 1
            if num_blocks >= MAX_BLOCKS_PER_PAGE:
                break
        return EventPage(events, first + len(events), first - since, self.log_id)


def to_dict(event: Event) -> dict[str, Any]:
    """An event in TensorRT-LLM's schema, ready for JSON. Hashes are `block_hash.as_int` of the whole ones."""
    return {"event_id": event.event_id, "window_size": event.window_size, "data": _data(event)}


def _data(event: Event) -> dict[str, Any]:
    if isinstance(event, Stored):
        salt, lora = event.cache_salt, event.lora_name
        blocks = [_block(block, salt, lora) for block in event.blocks]
        return {"type": "stored", "parent_hash": _number(event.parent_hash), "blocks": blocks}
    if isinstance(event, Removed):
        return {"type": "removed", "block_hashes": [as_int(each) for each in event.block_hashes]}
    if isinstance(event, Updated):
        block = event.block
        return {
            "type": "updated",
            "block_hash": as_int(block.block_hash),
            "cache_level": _diff(event.old_cache_level, block.cache_level),
            "priority": _diff(event.old_priority, block.priority),
        }
    return {"type": "created", "num_blocks_per_cache_level": event.num_blocks_per_cache_level}


def _block(block: Block, cache_salt: str | None, lora_name: str | None) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": as_int(block.block_hash),
        "tokens": [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in block.token_ids],
        "cache_level": block.cache_level,
        "priority": block.priority,
        "mm_keys": [],
        "cache_salt": cache_salt,
        "lora_name": lora_name,
    }


def _diff(old: int, new: int) -> dict[str, Any] | None:
    return {"type": "event_diff", "old_value": old, "new_value": new} if old != new else None


def _number(block_hash: bytes | None) -> int | None:
    return None if block_hash is None else as_int(block_hash)
