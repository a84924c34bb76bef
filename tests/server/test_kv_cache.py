# SPDX-License-Identifier: Apache-2.0
"""The KV cache over HTTP: events by cursor, retention of a request, cached tokens in the usage."""

import pytest
from fake_engine import FakeLLM

from headrace.core.block_hash import as_int, chain
from headrace.core.kv_events import Block
from headrace.core.retention import DEFAULT_PRIORITY

HASHES = chain((None,), range(64), 4)
RANGE = {"token_start": 0, "token_end": 2, "priority": 90, "duration_ms": 1000}


def store(server, index):
    """An event in the engine's log, which keeps four."""
    server.llm.events.stored(None, [Block(HASHES[index], (5, 6, 7, 8))], cache_salt="s")
    server.llm.events.flush()


def events(server, query=""):
    response = server.http.get(f"/kv_cache_events{query}")
    assert response.status_code == 200, response.text
    return response.json()


def test_readers_follow_events_by_their_cursors(serve):
    server = serve()
    empty = events(server)
    assert empty == {"events": [], "next": 0, "lost": 0, "log_id": server.llm.events.log_id}
    for index in range(3):
        store(server, index)
    page = events(server, "?limit=2")
    assert ([event["event_id"] for event in page["events"]], page["next"], page["lost"]) == ([0, 1], 2, 0)
    assert page["events"][1] == {
        "event_id": 1,
        "window_size": 512,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": as_int(HASHES[1]),
                    "tokens": [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in (5, 6, 7, 8)],
                    "cache_level": 0,
                    "priority": DEFAULT_PRIORITY,
                    "mm_keys": [],
                    "cache_salt": "s",
                    "lora_name": None,
                }
            ],
        },
    }
    assert events(server, "?limit=2") == page, "reading consumed something"
    assert [event["event_id"] for event in events(server, "?since=2")["events"]] == [2]
    for index in range(3, 8):
        store(server, index)
    late = events(server, "?since=2&limit=3")
    assert ([event["event_id"] for event in late["events"]], late["next"], late["lost"]) == ([4, 5, 6], 7, 2)


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("since=-1", "since", "since = '-1' is not a whole number of 0 or more."),
        ("since=x", "since", "since = 'x' is not"),
        ("since=", "since", "since = '' is not"),
        ("since=1.5", "since", "since = '1.5' is not"),
        ("since=%D9%A3", "since", "is not a whole number"),
        ("since=" + "9" * 30, "since", "is not a whole number"),
        ("since=1", "since", "since = 1 is no event's id: they go from 0 to 0"),
        ("limit=0", "limit", "limit must be from 1 to 10000, but is 0."),
        ("limit=10001", "limit", "but is 10001."),
        ("sinc=1", "sinc", "Unknown parameter: 'sinc'; there are since and limit."),
    ],
)
def test_a_bad_cursor_is_a_400_that_says_why(server, query, param, words):
    response = server.http.get(f"/kv_cache_events?{query}")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"]


def test_without_a_buffer_it_says_what_to_set(serve):
    llm = FakeLLM()
    llm.events.capacity = 0
    response = serve(llm).http.get("/kv_cache_events")
    assert response.status_code == 400 and "event_buffer_max_size is 0; set it" in response.json()["error"]["message"]


def test_events_show_prompts_so_only_an_admin_reads_them(serve):
    server = serve(api_key=["good"], admin_key=["boss"])
    for key, status in (("good", 401), ("boss", 200)):
        response = server.http.get("/kv_cache_events", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status


def test_the_retention_of_a_request_reaches_the_engine(server):
    wish = {"token_range_retention_configs": [RANGE], "decode_retention_priority": 10}
    for answer in (server.chat, server.complete):
        assert answer(kv_cache_retention_config=wish).status_code == 200
        found = server.llm.calls[-1].retention
        (one,) = found.token_range_retention_configs
        assert (one.token_start, one.token_end, one.priority, one.duration_ms) == (0, 2, 90, 1000)
        assert (found.decode_retention_priority, found.decode_duration_ms) == (10, None)
    server.chat(kv_cache_retention_config=None)
    assert server.llm.calls[-1].retention is None


def test_the_openai_client_sends_it_as_an_extra_field(server):
    server.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "Hi"}],
        extra_body={"kv_cache_retention_config": {"decode_retention_priority": 99}},
    )
    assert server.llm.calls[-1].retention.decode_retention_priority == 99


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"token_range_retention_configs": [{**RANGE, "priority": 101}]}, "[0]", "priority must be from 0 to 100"),
        ({"token_range_retention_configs": [{**RANGE, "duration_ms": -1}]}, "[0]", "duration_ms must be from 0 to"),
        ({"token_range_retention_configs": [{**RANGE, "token_end": 0}]}, "[0]", "token_end (0) must be above"),
        ({"token_range_retention_configs": [RANGE, RANGE]}, "", "overlap: 0 to 2 and 0 to 2"),
        ({"token_range_retention_configs": [{"priority": 3}]}, "[0].token_start", "Missing required parameter"),
        ({"decode_retention_priority": "35"}, ".decode_retention_priority", "valid integer"),
        ({"decode_priority": 35}, ".decode_priority", "Unknown parameter"),
        ([], "", "input should be an object"),
    ],
)
def test_a_bad_retention_is_a_400_that_names_the_field(server, wish, param, words):
    for answer in (server.chat, server.complete):
        response = answer(kv_cache_retention_config=wish)
        error = response.json()["error"]
        assert response.status_code == 400 and words in error["message"]
        field = "kv_cache_retention_config"
        ranges = f"{field}.token_range_retention_configs"
        assert error["param"] == (f"{ranges}{param}" if param.startswith("[") else f"{field}{param}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_the_openai_client_reads_how_much_was_cached(serve, route, stream):
    client = serve(FakeLLM(num_cached_tokens=2)).openai
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if route == "chat":
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="fake", messages=messages, **options)
    else:
        answer = client.completions.create(model="fake", prompt="Hello", **options)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.prompt_tokens_details.cached_tokens == 2
