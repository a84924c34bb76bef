# SPDX-License-Identifier: Apache-2.0
"""What a reader of KV cache events knows: follows a log, asserts that it makes sense, compares it with the cache."""

from headrace.core.block_hash import child_hash, root_hash
from headrace.core.kv_events import Event, EventLog, Removed, Stored, Updated

Place = tuple[int, int]
"""Cache level and priority."""


class EventMirror:
    """The cached blocks of one window, by their hashes, as the events tell it."""

    def __init__(self, log: EventLog) -> None:
        self.places: dict[bytes, Place] = {}
        self._log = log
        self._next = 0

    def follow(self) -> None:
        """Read what is new.

        Raises:
            AssertionError: an event was lost, or says something that cannot be.
        """
        while (page := self._log.read(self._next, 1000)).events:
            assert page.lost == 0, f"{page.lost} events were lost: the log is too small for this test"
            for event in page.events:
                assert event.event_id == self._next
                self._next += 1
                self._take(event)

    def check(self, places: dict[bytes, Place]) -> None:
        """Follow, and compare with the blocks that the cache really has."""
        self.follow()
        assert self.places == places

    def _take(self, event: Event) -> None:
        if isinstance(event, Stored):
            parent = root_hash((event.cache_salt,)) if event.parent_hash is None else event.parent_hash
            for block in event.blocks:
                assert block.block_hash == child_hash(parent, block.token_ids), "not the hash of its tokens and parent"
                assert block.block_hash not in self.places, "stored twice"
                self.places[block.block_hash] = (block.cache_level, block.priority)
                parent = block.block_hash
        elif isinstance(event, Removed):
            for block_hash in event.block_hashes:
                assert block_hash in self.places, "removed, and was not there"
                del self.places[block_hash]
        elif isinstance(event, Updated):
            old, block = (event.old_cache_level, event.old_priority), event.block
            assert self.places.get(block.block_hash) == old, "updated, and was not so before"
            self.places[block.block_hash] = (block.cache_level, block.priority)
        else:
            assert not self.places and event.event_id == 0, "created anew"
