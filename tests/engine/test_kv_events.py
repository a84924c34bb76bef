# SPDX-License-Identifier: Apache-2.0
"""KV cache events on their way from the core to a user: by cursor, by what is new, and pushed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from headrace.config.cache import KvCacheConfig
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import ResolvedConfig
from headrace.core.block_hash import as_int, chain
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.kv_events import Block, EventLog, Sink, to_dict
from headrace.core.request import Request
from headrace.core.retention import Retention
from headrace.core.scheduler import Scheduler
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions
from headrace.engine.llm import LLM
from headrace.errors import ConfigError, RequestError
from headrace.kv_cache_retention import KvCacheRetentionConfig

HASHES = chain((None,), range(64), 4)


class Recorder:
    """Stands where the cache does: says what happened to blocks to the log that the core has made."""

    def __init__(self) -> None:
        self.logs: list[EventLog] = []

    def store(self, index: int) -> None:
        (log,) = self.logs
        parent = HASHES[index - 1] if index else None
        log.stored(parent, [Block(HASHES[index], (1, 2, 3, 4))])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Of a core in this process."""
    made = Recorder()
    real = EventLog.from_config

    def from_config(config: KvCacheConfig, window_size: int, sink: Sink | None = None) -> EventLog | None:
        log = real(config, window_size, sink)
        made.logs += [] if log is None else [log]
        return log

    real_scheduler = Scheduler.from_config

    def without_events(config: ResolvedConfig, layout: CacheLayout, events: object, num_host_blocks: int) -> Scheduler:
        return real_scheduler(config, layout, None, num_host_blocks)

    monkeypatch.setattr(EventLog, "from_config", from_config)
    # The cache itself keeps silent.
    monkeypatch.setattr(Scheduler, "from_config", without_events)
    return made


@pytest.fixture
def start(
    model_folder: Path, core_options: Callable[..., CoreOptions], recorder: Recorder
) -> Iterator[Callable[..., AsyncLLM]]:
    """Makes engines, to be started, with these settings of the cache."""
    made: list[AsyncLLM] = []

    def make(**settings: object) -> AsyncLLM:
        args = LlmArgs(model=str(model_folder), load_format="dummy", max_seq_len=512, kv_cache_config=settings)
        made.append(AsyncLLM(args, core=core_options(in_process=True)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def test_any_number_of_readers_get_every_event_by_their_cursors(
    start: Callable[..., AsyncLLM], recorder: Recorder, run: Callable[..., None]
) -> None:
    async def go() -> None:
        llm = start(event_buffer_max_size=4)
        await llm.start()
        for index in range(3):
            recorder.store(index)
            assert (await llm.read_kv_cache_events(index)).next == index + 1
        first = await llm.read_kv_cache_events(0, 2)
        assert [to_dict(event)["data"]["blocks"][0]["block_hash"] for event in first.events] == [
            as_int(each) for each in HASHES[:2]
        ]
        assert (first.next, first.lost, {event.window_size for event in first.events}) == (2, 0, {512})
        assert await llm.read_kv_cache_events(0, 2) == first
        for index in range(3, 7):
            recorder.store(index)
            await llm.read_kv_cache_events()
        late = await llm.read_kv_cache_events(first.next)
        assert ([event.event_id for event in late.events], late.next, late.lost) == ([3, 4, 5, 6], 7, 1)
        with pytest.raises(RequestError, match="since = 8 is no event's id"):
            await llm.read_kv_cache_events(8)

    run(go())


def test_each_call_gives_what_is_new_and_says_what_is_lost(
    start: Callable[..., AsyncLLM], recorder: Recorder, run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        llm = start(event_buffer_max_size=3)
        await llm.start()
        assert await llm.get_kv_cache_events() == []
        recorder.store(0)
        (event,) = await llm.get_kv_cache_events()
        assert event["event_id"] == 0 and event["data"]["type"] == "stored"
        assert await llm.get_kv_cache_events(0.01) == []
        waiting = [asyncio.ensure_future(llm.get_kv_cache_events(20)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waiting)
        recorder.store(1)
        assert [each["event_id"] for each in await waiting[0]] == [1]
        assert not waiting[1].done(), "two callers got the same event"
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert "overwritten" not in caplog.text
        for index in range(2, 8):
            recorder.store(index)
            await llm.read_kv_cache_events()
        assert [each["event_id"] for each in await llm.get_kv_cache_events()] == [5, 6, 7]
        assert "3 KV cache events were overwritten" in caplog.text

    run(go())


def test_a_step_flushes_what_it_brought_to_the_push_stream(
    start: Callable[..., AsyncLLM], recorder: Recorder, run: Callable[..., None], tmp_path: Path
) -> None:
    async def go() -> None:
        addresses = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
        llm = start(kv_events_config={"enable_kv_cache_events": True, **addresses})
        await llm.start()
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.connect(addresses["endpoint"])
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            await asyncio.sleep(0.2)
            recorder.store(0)
            assert not socket.poll(100), "nothing has run"
            await llm.generate([1, 2, 3], {"max_tokens": 1}).final()
            assert socket.poll(5000)
            topic, seq, payload = socket.recv_multipart()
            assert (topic, int.from_bytes(seq, "big")) == (b"", 0)
            stored = ["BlockStored", [as_int(HASHES[0])], None, [1, 2, 3, 4], 4, None, "GPU"]
            assert msgspec.msgpack.decode(payload)[1] == [stored]
        with pytest.raises(RequestError, match="event_buffer_max_size is 0"):
            await llm.get_kv_cache_events()
        llm.shutdown()
        # The address is free again.
        second = start(kv_events_config={"enable_kv_cache_events": True, **addresses})
        await second.start()

    run(go())


def test_an_address_that_is_taken_stops_the_start_before_the_model_loads(
    model_folder: Path, core_options: Callable[..., CoreOptions], run: Callable[..., None]
) -> None:
    async def go() -> None:
        with zmq.Context() as context, context.socket(zmq.PUB) as other:
            port = other.bind_to_random_port("tcp://127.0.0.1")
            stream = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
            args = LlmArgs(model=str(model_folder), load_format="dummy", kv_cache_config={"kv_events_config": stream})
            llm = AsyncLLM(args, core=core_options("CannotLoad"))
            with pytest.raises(ConfigError, match=r"endpoint = tcp://127.0.0.1:\d+ cannot be bound"):
                await llm.start()
            llm.shutdown()

    run(go())


def test_without_events_a_reader_is_told_what_to_set(
    engine: Callable[..., AsyncIterator[AsyncLLM]], run: Callable[..., None]
) -> None:
    async def go() -> None:
        async with engine() as llm:
            with pytest.raises(RequestError, match="event_buffer_max_size is 0; set it"):
                await llm.get_kv_cache_events()

    run(go())


def test_the_llm_api_gives_tensorrt_llms_lists(
    model_folder: Path, core_options: Callable[..., CoreOptions], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreOptions, "from_environment", lambda: core_options(in_process=True))
    with LLM(str(model_folder), load_format="dummy", kv_cache_config={"event_buffer_max_size": 100}) as llm:
        recorder.store(0)
        assert [event["event_id"] for event in llm.get_kv_cache_events(timeout=5)] == [0]
        assert llm.get_kv_cache_events() == []
        recorder.store(1)

        async def collect() -> list[int]:
            found = []
            async for event in llm.get_kv_cache_events_async(timeout=0.2):
                found.append(event["event_id"])
                if len(found) == 1:
                    recorder.store(2)
            return found

        assert asyncio.run(collect()) == [1, 2]


def test_the_hit_rate_is_in_the_statistics(
    engine: Callable[..., AsyncIterator[AsyncLLM]], run: Callable[..., None]
) -> None:
    async def go() -> None:
        async with engine() as llm:
            assert (await llm.get_stats())["cache_hit_rate"] == 0.0
            for _ in range(2):
                await llm.generate(list(range(128)), {"max_tokens": 1}).final()
            assert (await llm.get_stats())["cache_hit_rate"] == 127 / 256

    run(go())


def test_retention_and_salt_reach_the_core_with_each_prompt(
    model_folder: Path, core_options: Callable[..., CoreOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreOptions, "from_environment", lambda: core_options(in_process=True))
    taken: list[Request] = []
    add = Scheduler.add_request

    def note(scheduler: Scheduler, request: Request) -> None:
        taken.append(request)
        add(scheduler, request)

    monkeypatch.setattr(Scheduler, "add_request", note)
    params = {"max_tokens": 1}
    wish = KvCacheRetentionConfig(decode_retention_priority=90, decode_duration_ms=7)
    wanted = Retention([], 90, 7)
    other = {"token_range_retention_configs": [{"token_start": 0, "token_end": 2, "priority": 9}]}
    with LLM(str(model_folder), load_format="dummy") as llm:
        llm.generate(["abc", "def"], params, kv_cache_retention_config=[wish, other], cache_salt=["s", "t"])
        llm.generate("abc", params, kv_cache_retention_config=wish, cache_salt="s")
        llm.generate_async("abc", params, kv_cache_retention_config=wish).result(10)
        llm.chat([{"role": "user", "content": "hi"}], params, kv_cache_retention_config=wish, cache_salt="s")
        llm.generate(["abc", "def"], params)
        with pytest.raises(RequestError, match="2 prompts and 3 cache_salt; give one, or one for each"):
            llm.generate(["abc", "def"], params, cache_salt=["a", "b", "c"])
        with pytest.raises(RequestError, match="decode_retention_priority must be from 0 to 100"):
            llm.generate("abc", params, kv_cache_retention_config={"decode_retention_priority": 101})
    assert [request.retention_wish and request.retention_wish[0] for request in taken] == [
        wanted,
        Retention([(0, 2, 9, None)]),
        wanted,
        wanted,
        wanted,
        None,
        None,
    ]
    assert [request.cache_key[0] for request in taken] == ["s", "t", "s", None, "s", None, None]
