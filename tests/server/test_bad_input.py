# SPDX-License-Identifier: Apache-2.0
"""Every mistake is one clear 4xx in OpenAI's shape, before any stream begins, and the server goes on."""

import gzip
import json
import socket
import time

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"content-type": "application/json"}

# fields, param of the error
BOTH_ROUTES = [
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": "x" * 100_000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"priority": 101}, "priority"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"temprature": 1}, "temprature"),
    ({"no_such": 1}, "no_such"),
]

CHAT_ONLY = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
    ),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {"x": 1}}, "web_search_options"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True}, "messages"),
]

COMPLETIONS_ONLY = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 1_000_000}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": 1}, "echo"),
    ({"logit_bias": {"300": 1}}, "prompt"),
    ({"stop_token_ids": [300]}, "prompt"),
]


def check(response, status, param, **expected):
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert response.status_code == status, body
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["param"] == param, error
    assert error["message"] and len(error["message"]) < 300 and "Traceback" not in error["message"], error
    for key, value in expected.items():
        assert error[key] == value, error
    return error["message"]


@pytest.fixture(autouse=True)
def still_serves(server):
    yield
    assert server.chat("Say ok.", max_tokens=4).status_code == 200
    assert not server.llm.running


@pytest.mark.parametrize(("fields", "param"), BOTH_ROUTES + CHAT_ONLY)
def test_a_bad_field_of_a_chat_is_refused(server, fields, param):
    for stream in [{}] if "stream_options" in fields else [{}, {"stream": True}]:
        check(server.chat(**{**stream, **fields}), 400, param, type="invalid_request_error")


@pytest.mark.parametrize(("fields", "param"), BOTH_ROUTES + COMPLETIONS_ONLY)
def test_a_bad_field_of_a_completion_is_refused(server, fields, param):
    for stream in [{}] if "stream_options" in fields else [{}, {"stream": True}]:
        check(server.complete(**{**stream, **fields}), 400, param, type="invalid_request_error")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "frequency_penalty"])
def test_a_number_that_is_none_is_refused(server, field, number):
    body = f'{{"model": "fake", "prompt": "a", "{field}": {number}}}'
    check(server.http.post(COMPLETIONS, content=body, headers=JSON), 400, field)


def test_an_unknown_field_names_its_nearest(server):
    assert "'temperature'" in check(server.chat(temprature=1), 400, "temprature", code="unknown_parameter")


def test_a_field_that_is_not_built_says_so(server):
    assert "not supported" in check(server.chat(guided_json={"a": 1}), 400, "guided_json", code="unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["no-such-model", "", None, "x" * 100_000])
def test_an_unknown_model_is_a_404_that_lists_the_served_ones(server, path, model):
    body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    for given in ({"model": model}, *([{}] if model is None else [])):
        assert "'fake'" in check(server.post(path, body | given), 404, "model", code="model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_the_same_400_on_every_route(server, stream):
    fields = {"max_tokens": 1, "stream": stream}
    assert server.complete("x" * 255, **fields).status_code == 200
    for response, param in (
        (server.complete("x" * 256, **fields), "prompt"),
        (server.complete([65] * 256, **fields), "prompt"),
        (server.complete("x" * 30_000, **fields), "prompt"),
        (server.complete("x", max_tokens=1000, stream=stream), "prompt"),
        (server.chat("x" * 250, **fields), "messages"),
    ):
        message = check(response, 400, param, code="context_length_exceeded")
        assert "256" in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_raises_is_a_400(server, stream):
    assert "template" in check(server.chat("RAISE", stream=stream), 400, "messages")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "fake"',
        b"\xff\xfe",
        b'{"model": "\xc3"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{'a': 1}",
        b'{"a": 1}{"b": 2}',
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_what_is_not_json_is_a_400(server, path, body):
    message = check(server.http.post(path, content=body, headers=JSON), 400, None, code="invalid_json")
    assert "JSON" in message


@pytest.mark.parametrize("body", ["[]", "5", '"text"', "null", "true"])
def test_json_that_is_no_object_is_a_400(server, body):
    check(server.http.post(CHAT, content=body, headers=JSON), 400, None, type="invalid_request_error")


def test_a_deep_value_inside_a_free_field_is_refused_or_taken_but_never_a_500(server):
    deep = "[" * 150 + "]" * 150
    body = f'{{"model": "fake", "messages": [{{"role": "user", "content": "x"}}], "metadata": {deep}}}'
    assert server.http.post(CHAT, content=body, headers=JSON).status_code in (200, 400)


def test_paths_and_methods_that_do_not_exist(server):
    for path in ("/", "/v1/nope", "/v1/chat/completions/", "//v1/chat/completions", "/docs"):
        check(server.http.post(path, json={}), 404, None)
    check(server.http.get(CHAT), 405, None)
    check(server.http.delete("/v1/models"), 405, None)
    check(server.http.get("/v1/models/nope"), 404, "model", code="model_not_found")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_is_read(server, kind):
    body = b'{"model": "fake", "prompt": "a"}'
    check(server.http.post(COMPLETIONS, content=body, headers={"content-type": kind}), 415, None)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, gzip"])
def test_compressed_bodies_are_not_inflated(server, encoding):
    body = gzip.compress(b'{"model": "fake", "prompt": "a"}')
    check(server.http.post(COMPLETIONS, content=body, headers={**JSON, "content-encoding": encoding}), 415, None)


def test_a_body_of_50_mb_is_a_413_that_the_client_really_sees(server):
    body = json.dumps({"model": "fake", "prompt": "x" * 50_000_000}).encode()
    check(server.http.post(COMPLETIONS, content=body, headers=JSON), 413, None, code="body_too_large")
    # The length may be unknown at the start.
    pieces = (body[i : i + 2**20] for i in range(0, len(body), 2**20))
    check(server.http.post(COMPLETIONS, content=pieces, headers=JSON), 413, None, code="body_too_large")


def test_a_client_that_asks_before_sending_is_told_at_once(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_a_bad_field_of_the_tokenizer_routes_is_refused(server, path, body, param):
    check(server.post(path, body), 400, param)


def test_the_tokenizer_routes_know_their_models_too(server):
    check(server.post("/tokenize", {"prompt": "a", "model": "nope"}), 404, "model")
    check(server.post("/detokenize", {"tokens": [65], "model": "nope"}), 404, "model")


def test_a_million_mistakes_are_one_short_answer(server):
    started = time.monotonic()
    check(server.complete(["a", *[1] * 300_000]), 400, None)
    check(server.complete(**{f"f{number}": 1 for number in range(300_000)}), 400, None)
    check(server.complete(stop=["x"] * 1_000_000), 400, "stop")
    assert time.monotonic() - started < 20


def test_ten_thousand_messages_are_too_long_and_no_more(server):
    messages = [{"role": "user", "content": "x"}] * 10_000
    check(server.post(CHAT, {"model": "fake", "messages": messages}), 400, "messages", code="context_length_exceeded")
