# SPDX-License-Identifier: Apache-2.0
"""Keys, health, models, tokenizer routes; clients that leave; an engine that dies; a server that stops."""

import asyncio
import json
import socket
import time

import httpx
import pytest
from fake_engine import Answer, FakeLLM
from openai import APIError, AsyncOpenAI, AuthenticationError, InternalServerError, OpenAI
from running_server import wait_for

from headrace.server.context import Lifecycle

HI = [{"role": "user", "content": "Hi"}]
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/kv_cache_events"),
    ("GET", "/health_generate"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/v1/chat/completions/"),
]


def slow(prompt, choice):
    return Answer("x" * 200, seconds_per_step=0.01)


def hanging(prompt, choice):
    return Answer("x" * 200, hang_after=3)


def open_stream(server, path="/v1/chat/completions", **fields):
    """A raw connection that has read the beginning of a stream."""
    body = json.dumps({"model": "fake", "messages": HI, "stream": True, **fields}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_models_list_and_retrieve(server):
    (model,) = server.openai.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("fake", "model", "headrace", 256)
    assert server.openai.models.retrieve("fake") == model


def test_version_and_info(server):
    assert set(server.http.get("/version").json()) == {"version"}
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health_generate").status_code == 200


def test_tokenize_gives_what_a_request_starts_from_and_detokenize_gives_it_back(server):
    text = "naïve 世 🎉"
    body = server.post("/tokenize", {"prompt": text}).json()
    assert body == {"tokens": list(text.encode()), "count": len(text.encode()), "max_model_len": 256}
    assert server.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": HI}).json()
    assert chat["count"] == server.chat().json()["usage"]["prompt_tokens"]


def test_the_openapi_document_names_the_request_models(server):
    document = server.http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["title"] == "ChatCompletionRequest"


def test_the_clients_request_id_comes_back_where_it_is_sane(server):
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "x" * 200, "a\tb"):
        given = server.http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert given and given != bad
    assert server.post("/nope", {}, headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"


def test_one_id_of_two_clients_makes_two_requests(server):
    calls = [server.chat(request_id="same", stream=True) for _ in range(2)]
    assert all(r.status_code == 200 for r in calls)
    assert len({c.request_id for c in server.llm.calls[-2:]}) == 2


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "bearer",
        "Basic good",
        "good",
        "Bearer göod",
        b"Bearer \xff\xfe",
        "Bearer good2",
    ],
)
def test_every_route_but_health_needs_a_key(serve, header):
    server = serve(api_key=["good", "other"], admin_key=["boss"])
    headers = {} if header is None else {"authorization": header.encode() if isinstance(header, str) else header}
    for method, path in ROUTES:
        response = server.http.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert server.http.get("/health", headers=headers).status_code == 200


def test_each_key_opens_and_only_the_admin_key_opens_admin_routes(serve):
    server = serve(api_key=["good", "other"], admin_key=["boss"])
    for key in ("good", "other", "boss"):
        client = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        with client:
            assert client.models.list().data[0].id == "fake"
        status = server.http.get("/server_info", headers={"authorization": f"Bearer {key}"}).status_code
        assert (status == 401) == (key != "boss")
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="bad", max_retries=0) as client,
        pytest.raises(AuthenticationError),
    ):
        client.models.list()


def test_an_error_nobody_expected_is_a_500_without_its_insides(serve, caplog):
    llm = FakeLLM()
    llm.render_chat = lambda *a, **k: 1 // 0
    response = serve(llm).chat()
    assert response.status_code == 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "ZeroDivision" not in response.text and "division" not in response.text
    assert "x-request-id" in response.headers


@pytest.mark.parametrize("answer", [slow, hanging])
def test_a_stream_whose_client_leaves_frees_its_requests_at_once(serve, answer):
    server = serve(FakeLLM(answer=answer))
    for fields in ({}, {"n": 2}):
        sock = open_stream(server, **fields)
        wait_for(lambda: len(server.llm.running) == 1)
        sock.recv(100)
        started = time.monotonic()
        sock.close()
        wait_for(lambda: not server.llm.running)
        assert time.monotonic() - started < 0.5
    assert server.lifecycle.num_requests == 0


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_whose_client_leaves_frees_its_requests_at_once(serve, prompt, stream):
    server = serve(FakeLLM(answer=hanging))
    body = {"model": "fake", "prompt": prompt, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body)
    wait_for(lambda: not server.llm.running)
    assert all(call.is_closed for call in server.llm.calls)
    wait_for(lambda: server.lifecycle.num_requests == 0)


def test_a_client_that_leaves_while_it_still_sends_harms_nobody(serve):
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 500\r\n\r\n{"
        )
        wait_for(lambda: server.lifecycle.num_requests == 1)
    wait_for(lambda: server.lifecycle.num_requests == 0)
    assert server.chat().status_code == 200


def test_a_slow_reader_gets_the_whole_text(serve):
    text = "0123456789" * 20
    server = serve(FakeLLM(answer=lambda p, c: Answer(text)))
    got = []
    for chunk in server.openai.chat.completions.create(model="fake", messages=HI, stream=True):
        time.sleep(0.002)
        got.append(chunk.choices[0].delta.content or "")
    assert "".join(got) == text


def test_64_streams_at_once_each_get_their_own_text(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer(f"You said {p}.", seconds_per_step=0.001)))

    async def one(client, number):
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": f"n{number}"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    assert asyncio.run(main()) == [f"You said [user]n{number}." for number in range(64)]


def test_a_dead_engine_fails_what_is_pending_with_its_reason(serve):
    server = serve(FakeLLM(answer=hanging))
    stream = iter(server.openai.chat.completions.create(model="fake", messages=HI, stream=True))
    next(stream)
    with httpx.Client(base_url=server.url, timeout=10) as client:
        task = asyncio.run_coroutine_threadsafe(
            asyncio.to_thread(client.post, "/v1/completions", json={"model": "fake", "prompt": "a"}), server.loop
        )
        wait_for(lambda: len(server.llm.running) == 2)
        server.on_loop(server.llm.die, "worker 0 was killed by signal 9")
        plain = task.result(5)
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "engine_dead")
    assert "signal 9" in plain.json()["error"]["message"]
    with pytest.raises(APIError, match="signal 9"):
        list(stream)
    for response in (server.http.get("/health"), server.chat(), server.chat(stream=True)):
        assert response.status_code == 503
        assert "signal 9" in response.json()["error"]["message"]
    with pytest.raises(InternalServerError, match="signal 9"):
        server.openai.chat.completions.create(model="fake", messages=HI)


def test_a_stream_that_ends_by_an_error_has_no_done(serve):
    server = serve(FakeLLM(answer=hanging))
    sock = open_stream(server)
    wait_for(lambda: len(server.llm.running) == 1)
    server.on_loop(server.llm.die, "gone")
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += sock.recv(4096)
    sock.close()
    assert b'"code":"engine_dead"' in received and b"[DONE]" not in received and b'"stop"' not in received


def test_a_server_that_loads_or_stops_answers_503_and_its_health_says_so(serve):
    lifecycle = Lifecycle("loading")
    server = serve(None, lifecycle)
    for phase, code in (("loading", "model_loading"), ("draining", "server_stopping")):
        lifecycle.phase = phase
        for response in (server.http.get("/health"), server.chat(), server.http.get("/v1/models")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)
            assert response.headers["retry-after"]
        assert server.http.get("/version").status_code == 200
    lifecycle.phase = "serving"
    assert server.chat().status_code == 200


def test_running_requests_finish_while_the_server_drains(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("x" * 30, seconds_per_step=0.01)))
    stream = iter(server.openai.chat.completions.create(model="fake", messages=HI, stream=True))
    next(stream)
    server.on_loop(server.lifecycle.drain)
    wait_for(lambda: server.http.get("/health").status_code == 503)
    assert server.chat().status_code == 503
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "x" * 30
    wait_for(lambda: server.lifecycle.num_requests == 0)


def test_a_full_queue_refuses_with_503(serve):
    server = serve(FakeLLM(answer=hanging), max_waiting_requests=1)
    streams = [open_stream(server) for _ in range(5)]
    wait_for(lambda: server.lifecycle.num_sequences == 5)
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    streams.pop().close()
    wait_for(lambda: server.lifecycle.num_sequences == 4)
    assert server.chat("Hi", max_tokens=1).status_code == 200
    for sock in streams:
        sock.close()


def test_every_choice_of_every_prompt_counts_as_waiting(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer(hang_after=1 if p == "x" else None)), max_waiting_requests=1)
    body = {"model": "fake", "prompt": ["x", "x", "x"], "n": 2, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # a name keeps it open: httpx closes the connection of one let go
        next(lines)
        assert server.lifecycle.num_sequences == 6
        assert server.chat().status_code == 503
    wait_for(lambda: server.lifecycle.num_sequences == 0)
    assert server.chat().status_code == 200


def test_a_page_may_call_only_from_an_allowed_origin(serve):
    server = serve(allow_origins=["https://good.example"])
    for origin, allowed in (("https://good.example", True), ("https://bad.example", False)):
        headers = server.http.get("/health", headers={"origin": origin}).headers
        assert (headers.get("access-control-allow-origin") == origin) == allowed
