# SPDX-License-Identifier: Apache-2.0
"""The push stream against real ZMQ subscribers: in time, late, slow."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from headrace.config.cache import KvEventsConfig
from headrace.core.block_hash import as_int, chain
from headrace.core.kv_events import Block, EventLog
from headrace.engine.kv_event_stream import KvEventStream
from headrace.errors import ConfigError

SIZE = 4
HASHES = chain((None,), range(40), SIZE)
END = b"\xff" * 8


def block(index: int, level: int = 0) -> Block:
    return Block(HASHES[index], tuple(range(index * SIZE, (index + 1) * SIZE)), level)


def shown(*indices: int) -> list[int]:
    return [as_int(HASHES[index]) for index in indices]


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


@pytest.fixture
def open_stream(tmp_path: Path) -> Iterator[Callable[..., KvEventStream]]:
    opened: list[KvEventStream] = []

    def make(**settings: Any) -> KvEventStream:
        addresses = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
        opened.append(KvEventStream(KvEventsConfig(enable_kv_cache_events=True, **{**addresses, **settings})))
        return opened[-1]

    yield make
    for stream in opened:
        stream.close()


@pytest.fixture
def subscribe(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> Iterator[Callable[..., "zmq.Socket[bytes]"]]:
    sockets: list[zmq.Socket[bytes]] = []

    def make(topic: str = "", **options: int) -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.SUB)
        for name, value in options.items():
            socket.setsockopt(vars(zmq)[name], value)
        socket.connect(f"ipc://{tmp_path}/pub")
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        sockets.append(socket)
        return socket

    yield make
    for socket in sockets:
        socket.close(0)


@pytest.fixture
def replay(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> Callable[[int], list[tuple[int, Any]]]:
    def ask(first: int) -> list[tuple[int, Any]]:
        found = []
        with context.socket(zmq.DEALER) as socket:
            socket.connect(f"ipc://{tmp_path}/replay")
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                assert socket.poll(5000), "no end of the replay"
                empty, seq, payload = socket.recv_multipart()
                assert empty == b""
                if seq == END:
                    assert payload == b""
                    return found
                found.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))

    return ask


def receive(socket: "zmq.Socket[bytes]", count: int) -> list[tuple[bytes, int, Any]]:
    """The next so many messages: topic, sequence number, batch."""
    found = []
    for _ in range(count):
        assert socket.poll(5000), f"{len(found)} of {count} messages came"
        topic, seq, payload = socket.recv_multipart()
        found.append((topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))
    return found


def log_into(stream: KvEventStream) -> EventLog:
    return EventLog(0, 512, stream.publish)


def until_heard(stream: KvEventStream, socket: "zmq.Socket[bytes]") -> int:
    """Publish until the subscriber, whose connection takes its time, hears something; the next sequence number."""
    log = log_into(stream)
    for seq in range(500):
        log.removed([HASHES[0]])
        log.flush()
        if socket.poll(20):
            while socket.poll(50):
                socket.recv_multipart()
            return seq + 1
    raise AssertionError("the subscriber heard nothing")


def test_events_have_the_shape_that_routers_read(
    open_stream: Callable[..., KvEventStream], subscribe: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    stream = open_stream(topic="kv")
    socket = subscribe("k")
    seq = until_heard(stream, socket)
    log = log_into(stream)
    before = time.time()
    log.created([64])
    log.stored(None, [block(0), block(1)])
    log.stored(HASHES[1], [block(2)], cache_salt="s", lora_name="a")
    log.stored(None, [block(0)], cache_salt="s")
    log.removed([HASHES[2], HASHES[1]])
    log.flush()
    ((topic, number, (at, events, rank)),) = receive(socket, 1)
    assert (topic, number, rank) == (b"kv", seq, 0) and before <= at <= time.time()
    assert events == [
        ["AllBlocksCleared"],
        ["BlockStored", shown(0, 1), None, list(range(8)), SIZE, None, "GPU"],
        ["BlockStored", shown(2), shown(1)[0], [8, 9, 10, 11], SIZE, None, "GPU", "a", [None]],
        ["BlockStored", shown(0), None, [0, 1, 2, 3], SIZE, None, "GPU", None, [["s"]]],
        ["BlockRemoved", shown(2, 1), "GPU"],
    ]


def test_a_block_is_followed_from_level_to_level(
    open_stream: Callable[..., KvEventStream], replay: Callable[[int], list[tuple[int, Any]]]
) -> None:
    log = log_into(open_stream())
    log.stored(None, [block(0), block(1), block(2, 1), block(3, 1)])
    log.updated(HASHES[0], block(1, 1), old_cache_level=0, old_priority=35)
    log.updated(None, Block(HASHES[0], (0, 1, 2, 3), 0, 90), old_cache_level=0, old_priority=35)
    log.updated(HASHES[1], block(2), old_cache_level=1, old_priority=35)
    log.removed(HASHES[:4])
    log.flush()
    ((_, (_, events, _)),) = replay(0)
    assert events == [
        ["BlockStored", shown(0, 1), None, list(range(8)), SIZE, None, "GPU"],
        ["BlockStored", shown(2, 3), shown(1)[0], list(range(8, 16)), SIZE, None, "CPU"],
        ["BlockRemoved", shown(1), "GPU"],
        ["BlockStored", shown(1), shown(0)[0], [4, 5, 6, 7], SIZE, None, "CPU"],
        # Back on the device, and known on the host still.
        ["BlockStored", shown(2), shown(1)[0], [8, 9, 10, 11], SIZE, None, "GPU"],
        ["BlockRemoved", shown(0, 2), "GPU"],
        ["BlockRemoved", shown(1, 2, 3), "CPU"],
    ]
    log.stored(None, [block(2)])
    log.removed([HASHES[2]])
    log.flush()
    assert [event[-1] for event in replay(1)[0][1][1]] == ["GPU", "GPU"], "it is remembered on the host"


def test_a_subscriber_that_starts_late_replays_what_it_missed(
    open_stream: Callable[..., KvEventStream],
    subscribe: Callable[..., "zmq.Socket[bytes]"],
    replay: Callable[[int], list[tuple[int, Any]]],
) -> None:
    stream = open_stream()
    log = log_into(stream)
    for index in range(5):
        log.stored(HASHES[index - 1] if index else None, [block(index)])
        log.flush()
    socket = subscribe()
    until_heard(stream, socket)
    log.removed([HASHES[0]])
    log.flush()
    ((_, live, _),) = receive(socket, 1)
    missed = [each for each in replay(0) if each[0] < live]
    assert [seq for seq, _ in missed] == list(range(live))
    assert [batch[1][0][1] for _, batch in missed[:5]] == [shown(index) for index in range(5)]
    # From the middle; and from what has not been yet, which is nothing.
    assert [seq for seq, _ in replay(3)] == list(range(3, live + 1))
    assert replay(live + 1) == []


def test_a_replay_begins_with_the_oldest_that_is_kept(
    open_stream: Callable[..., KvEventStream], replay: Callable[[int], list[tuple[int, Any]]]
) -> None:
    log = log_into(open_stream(buffer_steps=3))
    for index in range(8):
        log.removed([HASHES[index]])
        log.flush()
    found = replay(2)
    assert [seq for seq, _ in found] == [5, 6, 7]
    assert [batch[1] for _, batch in found] == [[["BlockRemoved", shown(index), "GPU"]] for index in (5, 6, 7)]


def test_a_slow_subscriber_holds_up_nobody_and_sees_the_gap(
    open_stream: Callable[..., KvEventStream],
    subscribe: Callable[..., "zmq.Socket[bytes]"],
    replay: Callable[[int], list[tuple[int, Any]]],
) -> None:
    """It reads nothing while 500 batches of 100 kB come, and its queue takes ten."""
    stream = open_stream(hwm=10, buffer_steps=20)
    slow = subscribe(RCVHWM=1, RCVBUF=4096)
    seq = until_heard(stream, slow)
    log = log_into(stream)
    tokens = tuple(range(100_000, 125_000))
    slowest = 0.0
    for _ in range(500):
        log.stored(None, [Block(HASHES[0], tokens)])
        started = time.perf_counter()
        log.flush()
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.001)
    assert slowest < 0.1, "publishing waited"
    last = seq + 499
    assert [number for number, _ in replay(last)] == [last]
    numbers = []
    while slow.poll(200):
        numbers.append(int.from_bytes(slow.recv_multipart()[1], "big"))
    assert numbers == sorted(set(numbers)) and 0 < len(numbers) < 500, "it lost none, so the test proves nothing"


def test_a_queue_that_is_full_drops_batches_and_leaves_a_gap(
    open_stream: Callable[..., KvEventStream],
    replay: Callable[[int], list[tuple[int, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = open_stream(max_queue_size=2)
    # The sender comes to nothing while the queue fills: it has not been woken.
    wake = stream._wake
    monkeypatch.setattr(stream, "_wake", silent := FakeSocket())
    log = log_into(stream)
    for index in range(5):
        log.removed([HASHES[index]])
        log.flush()
    assert silent.num_sent == 2
    monkeypatch.setattr(stream, "_wake", wake)
    wake.send(b"")
    assert [seq for seq, _ in replay(0)] == [0, 1]
    log.removed([HASHES[6]])
    log.flush()
    found = replay(0)
    assert [(seq, batch[1][0][1]) for seq, batch in found] == [(0, shown(0)), (1, shown(1)), (5, shown(6))]


class FakeSocket:
    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, data: bytes) -> None:
        self.num_sent += 1


def test_what_is_no_replay_request_is_ignored(
    context: "zmq.Context[zmq.Socket[bytes]]",
    open_stream: Callable[..., KvEventStream],
    replay: Callable[[int], list[tuple[int, Any]]],
    tmp_path: Path,
) -> None:
    log = log_into(open_stream())
    log.removed([HASHES[0]])
    log.flush()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{tmp_path}/replay")
        for frames in ([b"x"], [b"", b"short"], [b"", b"8 bytes!", b"more"]):
            socket.send_multipart(frames)
        assert [seq for seq, _ in replay(0)] == [0]
        assert not socket.poll(100)


def test_what_waits_is_sent_before_the_end(
    open_stream: Callable[..., KvEventStream], subscribe: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    stream = open_stream()
    socket = subscribe()
    until_heard(stream, socket)
    log = log_into(stream)
    for index in range(5):
        log.removed([HASHES[index]])
        log.flush()
    stream.close()
    stream.close()
    assert [batch[1][0][1] for _, _, batch in receive(socket, 5)] == [shown(index) for index in range(5)]


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_is_taken_stops_the_start(open_stream: Callable[..., KvEventStream], name: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match="Address already in use; use a free address") as caught:
            open_stream(**{name: f"tcp://127.0.0.1:{port}"})
    assert caught.value.param == f"kv_cache_config.kv_events_config.{name}"
    assert f"= tcp://127.0.0.1:{port} cannot be bound" in caught.value.message


def test_an_address_that_is_none_stops_the_start(open_stream: Callable[..., KvEventStream]) -> None:
    with pytest.raises(ConfigError, match="endpoint = 5557 cannot be bound: Invalid argument"):
        open_stream(endpoint="5557")
