# SPDX-License-Identifier: Apache-2.0
"""The chat loop and its two models: what is remembered, what Ctrl-C stops, what a server may answer."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.cli.chat import Chat
from headrace.cli.local import Answer, Message
from headrace.cli.main import main
from headrace.cli.remote import RemoteModel, base_url, events
from headrace.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    RequestError,
    UserError,
)


def script(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


class Echo:
    """Answers with the last message, and records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    def __call__(self, messages: list[Message]) -> Answer:
        self.asked.append(messages)
        return Answer(messages[-1]["content"].upper(), False)


def test_a_chat_remembers_forgets_and_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "one", "", "two", "/reset", "three", "/help", "/nonsense", "/exit", "four")
    echo = Echo()
    assert Chat("m", echo, "be short").run() == 0
    contents = [[message["content"] for message in messages] for messages in echo.asked]
    assert contents == [["be short", "one"], ["be short", "one", "ONE", "two"], ["be short", "three"]]
    err = capsys.readouterr().err
    assert "Forgotten." in err and "/reset" in err and "Unknown command /nonsense" in err


def test_the_end_of_input_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "one")
    assert Chat("m", Echo(), None).run() == 0


def test_a_new_system_message_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "one", "/system speak Latin", "two")
    echo = Echo()
    Chat("m", echo, None).run()
    assert echo.asked[1] == [{"role": "system", "content": "speak Latin"}, {"role": "user", "content": "two"}]


def test_a_stopped_answer_is_remembered_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat("m", lambda messages: Answer("half an", True), None)
    chat.say("x")
    assert chat.messages == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "half an"}]
    assert "[stopped]" in capsys.readouterr().err
    chat = Chat("m", lambda messages: Answer("", True), None)
    chat.say("x")
    assert chat.messages == []


def test_a_refused_turn_is_taken_back_and_the_chat_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(messages: list[Message]) -> Answer:
        raise ContextLengthError("too long")

    chat = Chat("m", refuse, "system")
    chat.say("x")
    assert chat.messages == [{"role": "system", "content": "system"}]
    assert capsys.readouterr().err == "too long\n"


def test_a_dead_engine_ends_the_chat() -> None:
    def die(messages: list[Message]) -> Answer:
        raise EngineDeadError("killed")

    with pytest.raises(EngineDeadError):
        Chat("m", die, None).say("x")


def test_ctrl_c_at_the_prompt_is_a_hint_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[Any] = iter([KeyboardInterrupt(), "hello", EOFError()])

    def typed(prompt: str) -> str:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr("builtins.input", typed)
    echo = Echo()
    assert Chat("m", echo, None).run() == 0
    assert len(echo.asked) == 1
    assert "Ctrl-D or /exit leaves" in capsys.readouterr().err


class Handler(BaseHTTPRequestHandler):
    """A server whose answers a test scripts: path -> (status, body); a str body is streamed as it is."""

    replies: dict[str, tuple[int, Any]]
    seen: list[tuple[str, dict[str, Any], str | None]]

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body: dict[str, Any]) -> None:
        self.seen.append((self.path, body, self.headers["Authorization"]))
        status, said = self.replies[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write((said if isinstance(said, str) else json.dumps(said)).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server:
    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, Any]] = {"/v1/models": (200, {"data": [{"id": "served"}]})}
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []
        handler = type("Scripted", (Handler,), {"replies": self.replies, "seen": self.seen})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def streams(self, *lines: str) -> None:
        self.replies["/v1/chat/completions"] = (200, "".join(f"{line}\n\n" for line in lines))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def delta(content: str | None, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


def ask(server: Server, **settings: object) -> tuple[Answer, str]:
    written: list[str] = []
    answer = RemoteModel(server.url, None, "k").chat([{"role": "user", "content": "hi"}], settings, written.append)
    return answer, "".join(written)


def test_a_server_is_asked_as_openai_clients_ask(server: Server) -> None:
    server.streams(": ping", delta("Hel"), delta("lo"), delta(None, "stop"), 'data: {"choices": []}', "data: [DONE]")
    answer, written = ask(server, temperature=0.5)
    assert (answer.text, written, answer.finish_reason, answer.was_stopped) == ("Hello", "Hello", "stop", False)
    path, body, key = server.seen[-1]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "served",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "temperature": 0.5,
    }
    assert key == "Bearer k"


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (
            400,
            {"error": {"message": "temperature must be a number."}},
            RequestError,
            "answered 400: temperature must be",
        ),
        (401, {"message": "no key"}, RequestError, "answered 401: no key"),
        (404, {"error": {"message": "no such model"}}, ModelNotFoundError, "no such model"),
        (500, "<html>", EngineError, "answered 500: Internal Server Error"),
    ],
)
def test_a_servers_refusal_is_told(server: Server, status: int, body: Any, error: type[Exception], said: str) -> None:
    server.replies["/v1/chat/completions"] = (status, body)
    with pytest.raises(error, match=said):
        ask(server)


def test_an_error_in_the_stream_and_a_stream_cut_short_are_told(server: Server) -> None:
    server.streams(delta("He"), 'data: {"error": {"message": "the engine died"}}')
    with pytest.raises(EngineError, match="the engine died"):
        ask(server)
    server.streams(delta("He"))
    with pytest.raises(EngineError, match="ended the answer without saying why"):
        ask(server)


def test_ctrl_c_keeps_what_a_server_has_said(server: Server) -> None:
    server.streams(delta("one"), delta("two"), delta(None, "stop"))

    def interrupt(text: str) -> None:
        if text == "two":
            raise KeyboardInterrupt

    answer = RemoteModel(server.url, "m", None).chat([], {}, interrupt)
    assert (answer.text, answer.was_stopped) == ("onetwo", True)


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    made = Server()
    made.http.server_close()
    assert main(["chat", "--url", made.url]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"headrace: Cannot reach {made.url}/v1: ") and len(err.splitlines()) == 1


def test_a_server_without_models_is_one_sentence(server: Server) -> None:
    server.replies["/v1/models"] = (200, {"data": []})
    with pytest.raises(UserError, match="lists no model; name one with --model"):
        RemoteModel(server.url, None, None)


def test_chat_with_a_server_from_the_command_line(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.streams(delta("Hello", "stop"), "data: [DONE]")
    script(monkeypatch, "hi")
    assert main(["chat", "--url", server.url, "--max_tokens", "5", "--api_key", "abc"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    _, body, key = server.seen[-1]
    assert (body["max_tokens"], body["model"], key) == (5, "served", "Bearer abc")


@pytest.mark.parametrize("url", ["h:80", "http://h:80", "http://h:80/", "http://h:80/v1", "http://h:80/v1/"])
def test_an_address_may_be_written_in_any_way(url: str) -> None:
    assert base_url(url) == "http://h:80/v1"


@pytest.mark.parametrize("url", ["ftp://h", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="not the address of a server"):
        base_url(url)


def test_events_are_read_past_what_is_not_ours() -> None:
    lines = [
        b"event: x\n",
        b"data:{}\n",
        b"data: nonsense\n",
        b'data: {"a": 1}\n',
        b"data: [DONE]\n",
        b'data: {"b": 2}\n',
    ]
    assert list(events(iter(lines))) == [{"a": 1}]
