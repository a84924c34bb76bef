# SPDX-License-Identifier: Apache-2.0
"""The push stream of KV cache events: a ZMQ PUB socket, and a ROUTER for subscribers that missed something.

A message is three frames: topic, sequence number (8 bytes, big-endian, from 0 without gaps), and a msgpack batch
`[time, [event, ...], rank]`, one for each step with events. Events are those that vLLM's subscribers read, as arrays:

    ["BlockStored", [hash, ...], parent hash, [token id, ...], block size, None, medium, lora name, [extra keys, ...]]
    ["BlockRemoved", [hash, ...], medium]
    ["AllBlocksCleared"]

The last two fields of a BlockStored are there where the blocks have an adapter or a salt. To replay, a DEALER or REQ
sends `[b"", first sequence number]` and gets `[b"", sequence number, batch]` for each batch from there on that is still
kept, then -1 with an empty batch.

All of it runs in a thread of its own, behind a bounded queue: a subscriber, however slow, holds up no step. What it
loses (a full queue of its own, a full queue here) leaves a gap in the sequence numbers.
"""

import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from headrace.config.cache import KvEventsConfig
from headrace.core.block_hash import as_int
from headrace.core.kv_events import Block, Event, Removed, Stored, Updated
from headrace.errors import ConfigError
from headrace.logger import get_logger

logger = get_logger(__name__)

MEDIA = ("GPU", "CPU", "STORAGE")
"""Cache levels in the stream's words; the device is "GPU" whatever it is."""
DEVICE = frozenset({0})
END = (-1).to_bytes(8, "big", signed=True)
STOP_WAIT_S = 2.0
LINGER_MS = 200
WAKE = "inproc://wake"


class KvEventStream:
    """Publishes what `publish` is given. `close` ends it."""

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        """Bind the sockets and start the thread.

        Raises:
            ConfigError: an address that cannot be bound.
        """
        self._config = config
        self._rank = rank
        self._context = zmq.Context()
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._seq = 0
        self._num_dropped = 0
        self._closing = False
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._bound(zmq.PUB, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._bound(zmq.ROUTER, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for end in (self._wake, self._woken):
            end.setsockopt(zmq.SNDHWM, 0)
            end.setsockopt(zmq.RCVHWM, 0)
        self._woken.bind(WAKE)
        self._wake.connect(WAKE)
        self._thread = threading.Thread(target=self._run, name="headrace-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, name: str, address: str) -> "zmq.Socket[bytes]":
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, self._config.hwm)
        bound.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            where = f"kv_cache_config.kv_events_config.{name}"
            raise ConfigError(
                f"{where} = {address} cannot be bound: {zmq.strerror(error.errno or 0)}; use a free address such as tcp://127.0.0.1:5557.",
                param=where,
            ) from None
        return bound

    def publish(self, events: list[Event]) -> None:
        """Send one step's events. Takes microseconds, whatever subscribers do; on the thread that made this object."""
        seq, self._seq = self._seq, self._seq + 1
        if len(self._queue) >= self._config.max_queue_size:
            if self._num_dropped == 0:
                logger.warning(
                    "KV cache events are dropped: %d batches wait to be sent (kv_events_config.max_queue_size).",
                    len(self._queue),
                )
            self._num_dropped += 1
            return
        self._queue.append((seq, time.time(), events))
        self._wake.send(b"")

    def close(self) -> None:
        """Send what waits, and end. Any number of times."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"stop")
        self._thread.join(STOP_WAIT_S)
        self._context.destroy(linger=LINGER_MS)

    def _run(self) -> None:
        sender = _Sender(self._config, self._rank)
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        stops = False
        while not stops:
            ready = dict(poller.poll())
            if self._woken in ready:
                stops = self._drain_wakes()
                while self._queue:
                    self._pub.send_multipart(sender.message(*self._queue.popleft()))
            if self._replay in ready:
                self._answer(sender)

    def _drain_wakes(self) -> bool:
        """Take all that woke this thread; whether one said to stop."""
        stops = False
        while self._woken.poll(0):
            stops = self._woken.recv() == b"stop" or stops
        return stops

    def _answer(self, sender: "_Sender") -> None:
        """Replay to one subscriber."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("A replay request has %d frames and is not [b'', 8 bytes]; ignored.", len(frames) - 1)
            return
        who, first = frames[0], int.from_bytes(frames[2], "big")
        for seq, payload in sender.kept:
            if seq >= first:
                self._replay.send_multipart([who, b"", seq.to_bytes(8, "big"), payload])
        self._replay.send_multipart([who, b"", END, b""])


class _Sender:
    """Spells batches out, and keeps the last of them."""

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        self._topic = config.topic.encode()
        self._rank = rank
        self._encode = msgspec.msgpack.Encoder().encode
        self._where: dict[bytes, set[int]] = {}
        """The levels on which subscribers know a block, where that is not the device alone."""
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)

    def message(self, seq: int, at: float, events: list[Event]) -> list[bytes]:
        """The frames of a batch."""
        spelled = [each for event in events for each in self._spell(event)]
        payload = self._encode([at, spelled, self._rank])
        self.kept.append((seq, payload))
        return [self._topic, seq.to_bytes(8, "big"), payload]

    def _spell(self, event: Event) -> list[list[Any]]:
        """The stream's events for one of ours."""
        if isinstance(event, Stored):
            return self._stored(event)
        if isinstance(event, Removed):
            return self._removed(event.block_hashes)
        if isinstance(event, Updated):
            return self._moved(event, event.block.cache_level)
        # A subscriber that outlived the last engine at this address forgets what it knew.
        return [["AllBlocksCleared"]]

    def _moved(self, event: Updated, level: int) -> list[list[Any]]:
        """A block on its way up stays known below until it is gone: a router that removes a block forgets what follows
        it, and that has not moved."""
        if level == event.old_cache_level:
            return []
        stored = self._run_of(event.parent_hash, [event.block], event)
        if level < event.old_cache_level:
            return [stored]
        self._where[event.block.block_hash].discard(event.old_cache_level)
        return [["BlockRemoved", [as_int(event.block.block_hash)], MEDIA[event.old_cache_level]], stored]

    def _stored(self, event: Stored) -> list[list[Any]]:
        """One event for each run of blocks on one level."""
        spelled: list[list[Any]] = []
        run, parent = event.blocks[:1], event.parent_hash
        for block in event.blocks[1:]:
            if block.cache_level != run[0].cache_level:
                spelled.append(self._run_of(parent, run, event))
                parent, run = run[-1].block_hash, []
            run.append(block)
        return [*spelled, self._run_of(parent, run, event)]

    def _run_of(self, parent: bytes | None, blocks: list[Block], event: Stored | Updated) -> list[Any]:
        """A BlockStored for blocks of one level, each the child of the one before it."""
        level = blocks[0].cache_level
        if level or self._where:
            for block in blocks:
                if level or block.block_hash in self._where:
                    self._where.setdefault(block.block_hash, set()).add(level)
        spelled: list[Any] = [
            "BlockStored",
            [as_int(block.block_hash) for block in blocks],
            None if parent is None else as_int(parent),
            [token_id for block in blocks for token_id in block.token_ids],
            len(blocks[0].token_ids),
            None,
            MEDIA[level],
        ]
        if event.lora_name is not None or event.cache_salt is not None:
            # As vLLM has it: a sequence's first block names the salt, and the rest have it from their parent.
            extra: list[list[str] | None] = [None] * len(blocks)
            if parent is None and event.cache_salt is not None:
                extra[0] = [event.cache_salt]
            spelled += [event.lora_name, extra]
        return spelled

    def _removed(self, block_hashes: list[bytes]) -> list[list[Any]]:
        by_level: dict[int, list[int]] = {}
        for each in block_hashes:
            for level in self._where.pop(each, DEVICE):
                by_level.setdefault(level, []).append(as_int(each))
        return [["BlockRemoved", by_level[level], MEDIA[level]] for level in sorted(by_level)]
