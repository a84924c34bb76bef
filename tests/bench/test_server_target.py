# SPDX-License-Identifier: Apache-2.0
"""The HTTP client against a real server over a fake engine, and against servers that misbehave."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from fake_engine import Answer, FakeLLM
from running_server import RunningServer

from headrace.bench.dataset import BenchRequest
from headrace.bench.http_client import HttpClient, HttpError
from headrace.bench.load import Load, Record, TargetGoneError
from headrace.bench.server_target import Endpoint, ServerTarget
from headrace.errors import EngineError, ModelNotFoundError, RequestError, UserError


def target_at(url: str, endpoint: Endpoint = "completions", **options: Any) -> ServerTarget:
    values = {"model": None, "temperature": 0.0, "ignore_eos": True, "extra": {}, **options}
    return ServerTarget(f"{url}/v1", endpoint, values.pop("api_key", None), **values)


def ask(target: ServerTarget, *requests: BenchRequest) -> list[Record]:
    async def main() -> list[Record]:
        await target.connect()
        load = Load(target, [[request] for request in requests], [0.0] * len(requests), None)
        await load.run()
        target.close()
        return load.records

    return asyncio.run(main())


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(llm: FakeLLM | None = None, **settings: Any) -> RunningServer:
        started.append(RunningServer(llm, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_token_ids_are_sent_as_they_are_and_every_piece_is_timed(serve: Callable[..., RunningServer]) -> None:
    llm = FakeLLM(lambda prompt, choice: Answer("x" * 50, seconds_per_step=0.01), num_cached_tokens=2)
    server = serve(llm)
    (record,) = ask(target_at(server.url), BenchRequest(0, 8, (65, 66, 67)))
    assert record.error is None
    assert llm.calls[-1].prompt_ids == [65, 66, 67]
    params = llm.calls[-1].params
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (8, 0.0, True)
    assert (record.num_prompt, record.num_output, record.num_cached) == (3, 8, 2)
    # The last token may come with the piece that ends the answer.
    assert len(record.arrivals) in (7, 8)
    assert record.started < record.arrivals[0] < record.arrivals[-1] <= record.ended
    assert record.arrivals[-1] - record.arrivals[0] > 0.04


def test_chat_sends_text_as_a_message(serve: Callable[..., RunningServer]) -> None:
    server = serve(FakeLLM(lambda prompt, choice: Answer("four")))
    target = target_at(server.url, "chat", ignore_eos=False, extra={"top_p": 0.5})
    (record,) = ask(target, BenchRequest(0, 20, prompt="Two and two?"))
    assert record.error is None and record.num_output == 5
    assert server.llm.rendered == [{"role": "user", "content": "Two and two?"}]
    params = server.llm.calls[-1].params
    assert params.top_p == 0.5 and not params.ignore_eos


def test_many_at_once_share_few_connections(serve: Callable[..., RunningServer]) -> None:
    server = serve(FakeLLM(lambda prompt, choice: Answer("abcdef")))
    target = target_at(server.url)

    async def main() -> tuple[list[Record], int]:
        await target.connect()
        load = Load(target, [[BenchRequest(i, 4, (70, i))] for i in range(40)], [0.0] * 40, 5)
        await load.run()
        return load.records, len(target._http._idle)

    records, connections = asyncio.run(main())
    assert [record.error for record in records] == [None] * 40
    assert sum(record.num_output for record in records) == 160
    assert connections <= 5


def test_a_request_that_is_refused_says_why_and_the_others_go_on(serve: Callable[..., RunningServer]) -> None:
    server = serve()
    records = ask(target_at(server.url), BenchRequest(0, 4, (9999,)), BenchRequest(1, 4, (65,)))
    by_task = {record.request.task_id: record for record in records}
    assert by_task[0].error == "400: Token id 9999 is not in the vocabulary"
    assert by_task[1].error is None


def test_an_answer_that_fails_on_the_way_is_a_failed_one(serve: Callable[..., RunningServer]) -> None:
    server = serve(FakeLLM(lambda prompt, choice: Answer("abcdef", fail_after=2)))
    (record,) = ask(target_at(server.url), BenchRequest(0, 6, (65,)))
    assert record.error is not None and "a NaN in this row" in record.error


def test_an_engine_that_dies_ends_the_load(serve: Callable[..., RunningServer]) -> None:
    llm = FakeLLM(lambda prompt, choice: Answer("x" * 200, hang_after=3))
    server = serve(llm)
    target = target_at(server.url)

    async def main() -> None:
        await target.connect()
        asyncio.get_running_loop().call_later(0.3, server.on_loop, llm.die, "the GPU melted")
        load = Load(target, [[BenchRequest(i, 50, (65,))] for i in range(20)], [0.0] * 20, 2)
        await load.run()

    with pytest.raises(TargetGoneError, match=r"the server's engine is dead: .*the GPU melted"):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_a_server_that_cannot_be_reached_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^Cannot reach http://127.0.0.1:9/v1: .*refused.*\.$"):
        ask(target_at("http://127.0.0.1:9"))


def test_a_server_that_wants_a_key_says_so_and_gets_it(serve: Callable[..., RunningServer]) -> None:
    server = serve(api_key=["s3cret"])
    with pytest.raises(RequestError, match=r"answered 401: "):
        ask(target_at(server.url))
    (record,) = ask(target_at(server.url, api_key="s3cret"), BenchRequest(0, 4, (65,)))
    assert record.error is None


class Peer(BaseHTTPRequestHandler):
    """Another's server: chunks of its own making, and failures on demand."""

    protocol_version = "HTTP/1.1"
    events: tuple[dict[str, Any], ...] = ()
    drops_after: int | None = None
    """Events after which the connection is cut."""
    models: tuple[int, dict[str, Any]] = (200, {"data": [{"id": "peer"}]})
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        status, body = self.models if self.path == "/v1/models" else (404, {})
        self._send(status, json.dumps(body).encode())

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index, event in enumerate(self.events):
            if index == self.drops_after:
                self.close_connection = True
                return
            # In two pieces, so that no read is a whole event.
            data = b"data: " + json.dumps(event).encode() + b"\r\n\r\n"
            self._chunk(data[:9])
            self._chunk(data[9:])
        self._chunk(b": a comment\n\ndata: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[Callable[..., str]]:
    servers: list[ThreadingHTTPServer] = []

    def start(**fields: Any) -> str:
        handler = type("ThisPeer", (Peer,), {"bodies": [], **fields})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


PIECES = (
    {"choices": [{"text": "a", "finish_reason": None}], "usage": None, "extra": 1},
    {"choices": [{"text": "", "finish_reason": None}]},
    {"choices": [{"text": "c", "finish_reason": "length"}]},
)
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def test_anothers_stream_is_read_with_what_it_says_and_does_not_say(peer: Callable[..., str]) -> None:
    (record,) = ask(target_at(peer(events=(*PIECES, USAGE))), BenchRequest(0, 3, (1, 2, 3)))
    assert record.error is None
    assert len(record.arrivals) == 3
    assert (record.num_prompt, record.num_output, record.num_cached) == (5, 3, None)
    (silent,) = ask(target_at(peer(events=PIECES)), BenchRequest(0, 3, (1, 2, 3)))
    assert (silent.num_prompt, silent.num_output) == (3, 3)


def test_only_ours_is_asked_for_token_ids(peer: Callable[..., str]) -> None:
    handler_bodies: list[dict[str, Any]] = []
    ask(target_at(peer(events=PIECES, bodies=handler_bodies), model="m"), BenchRequest(0, 3, (1, 2)))
    assert handler_bodies == [
        {
            "model": "m", "max_tokens": 3, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "prompt": [1, 2],
        }
    ]  # fmt: skip


def test_reasoning_and_tool_calls_are_pieces_of_a_chat_and_the_role_is_none(peer: Callable[..., str]) -> None:
    deltas = (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "so"},
        {"tool_calls": [{}]},
    )
    events = tuple({"choices": [{"delta": delta}]} for delta in deltas)
    (record,) = ask(target_at(peer(events=events), "chat"), BenchRequest(0, 3, prompt="x"))
    assert len(record.arrivals) == 3


def test_a_connection_that_breaks_fails_its_request_alone_while_the_server_lives(peer: Callable[..., str]) -> None:
    (record,) = ask(target_at(peer(events=PIECES, drops_after=1)), BenchRequest(0, 3, (1,)))
    assert record.error == "the connection broke: the server closed the connection"


def test_an_error_in_the_stream_and_an_end_without_done_are_failures(peer: Callable[..., str]) -> None:
    (record,) = ask(target_at(peer(events=(PIECES[0], {"error": {"message": "boom."}}))), BenchRequest(0, 3, (1,)))
    assert record.error == "boom"
    (nothing,) = ask(target_at(peer(events=())), BenchRequest(0, 3, (1,)))
    assert nothing.error == "the answer holds no token"


@pytest.mark.parametrize(
    ("models", "error", "said"),
    [
        ((404, {}), ModelNotFoundError, "answered 404: no reason given; is it an OpenAI-compatible server?"),
        ((500, {"error": "broken"}), EngineError, "answered 500: broken."),
        ((200, {"data": []}), UserError, "lists no model; name one with --model."),
    ],
)
def test_a_server_without_models_is_told(
    models: tuple[int, Any], error: type[Exception], said: str, peer: Callable[..., str]
) -> None:
    with pytest.raises(error) as caught:
        ask(target_at(peer(models=models)))
    assert said in str(caught.value)


def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    served = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", {})
        for _ in range(2):
            parts: list[bytes] = []
            assert await client.request("GET", "/x", None, parts.append) == 200
            assert parts == [b"ok"]
            await asyncio.sleep(0.1)
        client.close()
        server.close()
        with pytest.raises(HttpError):
            await client.request("GET", "/x", None, parts.append)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert len(served) == 2 and served[0].startswith(b"GET /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
