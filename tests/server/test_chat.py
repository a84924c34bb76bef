# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions as the `openai` client and the wire see it."""

import json
from typing import Any

import pytest
from fake_engine import Answer, FakeLLM
from openai import APIError

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def events(response: Any) -> list[Any]:
    """The JSON of each event; the string where it is not JSON."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_the_client_gets_the_answer_and_its_counts(server):
    answer = server.openai.chat.completions.create(model="fake", messages=HI)
    choice = answer.choices[0]
    assert choice.message.content == "An answer."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "fake"
    assert answer.usage.prompt_tokens == len("[user]Hi")
    assert answer.usage.completion_tokens == len("An answer.") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_required_keys_are_there_even_where_they_are_null(server):
    body = server.chat().json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(body["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"} - {"stop_reason"}
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "An answer.", "refusal": None}


def test_a_stream_is_role_then_text_then_an_empty_delta_with_the_reason(server):
    chunks = events(server.chat(stream=True))
    assert chunks.pop() == "[DONE]"
    assert all(set(c) == {"id", "object", "created", "model", "choices"} for c in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["delta"]) == {"content"} for c in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(c["delta"].get("content", "") for c in choices) == "An answer."


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_usage_comes_in_a_stream_only_when_asked_for(server, options, has_usage):
    chunks = events(server.chat(stream=True, **options))[:-1]
    if not has_usage:
        assert all("usage" not in c for c in chunks)
        return
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.chat().json()["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])


def test_continuous_usage_grows_with_the_stream(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in events(server.chat(stream=True, stream_options=options))[:-1]]
    assert counts == sorted(counts) and counts[-1] == len("An answer.") + 1


def test_text_split_inside_a_character_is_whole_in_the_stream(serve):
    text = "A 世 👩‍👩‍👧‍👦\u2028 end\x85"
    for size in (1, 2, 3, 7):
        server = serve(FakeLLM(answer=lambda p, c, size=size: Answer(text, tokens_per_step=size)))
        stream = server.openai.chat.completions.create(model="fake", messages=HI, stream=True)
        parts = [c.choices[0].delta.content or "" for c in stream]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_choices_that_end_at_different_times_each_get_their_text_and_reason(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("x" * (1 + 5 * c))))
    chunks = events(server.chat(stream=True, n=3, stream_options={"include_usage": True}))[:-1]
    texts, reasons = dict.fromkeys(range(3), ""), {key: [] for key in range(3)}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = [*reasons[choice["index"]], choice["finish_reason"]]
    assert texts == {0: "x", 1: "x" * 6, 2: "x" * 11}
    assert all(r[-1] == "stop" and not any(r[:-1]) for r in reasons.values())
    whole = server.chat(n=3).json()
    assert [c["message"]["content"] for c in whole["choices"]] == list(texts.values())
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["prompt_tokens"] == len("[user]Hi")
    assert whole["usage"]["completion_tokens"] == 2 + 7 + 12


def test_logprobs_have_an_entry_for_each_token_with_its_own_bytes(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("é!")))
    whole = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in whole] == [[0xC3], [0xA9], [0x21], None]
    assert bytes(b for e in whole for b in e["bytes"] or []).decode() == "é!"
    assert whole[0]["token"] == "bytes:\\xc3" and whole[2]["token"] == "!" and whole[3]["token"] == "<|end|>"
    assert [t["token"] for t in whole[2]["top_logprobs"]] == ["A", "!"], "best first"
    streamed = [
        entry
        for c in events(server.chat(stream=True, logprobs=True, top_logprobs=2))[:-1]
        for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


def test_impossible_alternatives_have_a_finite_log_probability(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("b")))
    entry = server.chat(logprobs=True, top_logprobs=9).json()["choices"][0]["logprobs"]["content"][0]
    assert min(t["logprob"] for t in entry["top_logprobs"]) == -9999.0


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
def test_logprobs_without_alternatives_are_only_the_chosen_tokens(server, fields):
    content = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len("An answer.") + 1
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_cached_prompt_tokens_are_reported(serve):
    usage = serve(FakeLLM(num_cached_tokens=5)).chat().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["prompt_tokens"] == len("[user]Hi")


def test_every_optional_field_may_be_null(server):
    names = [
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "temperature",
        "top_p",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "stop",
        "logit_bias",
        "user",
        "metadata",
        "store",
        "service_tier",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "logprobs",
        "top_logprobs",
        "modalities",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "functions",
        "function_call",
        "web_search_options",
        "safety_identifier",
        "prompt_cache_key",
        "top_k",
        "min_p",
        "guided_json",
        "echo",
        "cache_salt",
        "kv_cache_retention_config",
        "priority",
    ]
    assert server.chat(**dict.fromkeys(names)).status_code == 200


def test_settings_reach_the_engine(server):
    server.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        n=2,
        stop=["a", "b"],
        logit_bias={"65": -100},
        max_tokens=9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=True,
        top_logprobs=4,
        cache_salt="s",
        priority=80,
    )
    call = server.llm.calls[-1]
    params = call.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, 3)
    assert (params.n, params.stop_strings, params.logit_bias, params.max_tokens) == (2, ["a", "b"], {65: -100.0}, 9)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, [7])
    assert (params.include_stop_str_in_output, params.skip_special_tokens, params.logprobs) == (True, False, 4)
    assert (call.cache_salt, call.priority) == ("s", 80)


def test_defaults_are_the_requests_then_the_models_then_openais(serve):
    llm = FakeLLM()
    server = serve(llm)
    server.chat()
    assert (llm.calls[-1].params.temperature, llm.calls[-1].params.max_tokens) == (1.0, None)
    llm.info.default_sampling = {"temperature": 0.6, "top_k": 20}
    server.chat()
    assert (llm.calls[-1].params.temperature, llm.calls[-1].params.top_k) == (0.6, None), "the engine knows its top_k"
    server.chat(temperature=0)
    assert llm.calls[-1].params.temperature == 0


def test_top_p_zero_is_passed_on(server):
    assert server.chat(top_p=0).status_code == 200
    assert server.llm.calls[-1].params.top_p == 0.0


def test_max_completion_tokens_is_the_limit(server):
    assert server.chat(max_completion_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    assert server.chat(max_completion_tokens=3, max_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert server.chat(max_completion_tokens=3, max_tokens=4).json()["error"]["param"] == "max_completion_tokens"


def test_messages_reach_the_template_as_it_expects_them(server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Add", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "user", "content": "So?"},
    ]
    body = {"model": "fake", "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    assert server.post(CHAT, body).status_code == 200
    developer, user, assistant, tool, _ = server.llm.rendered
    assert developer == {"role": "developer", "content": "Be\nbrief."}
    assert user == {"role": "user", "content": "Add", "name": "ann"}
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["name"] == "add"
    assert set(assistant) == {"role", "content", "tool_calls"}
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert server.llm.render_options["enable_thinking"] is False


@pytest.mark.parametrize(
    ("flags", "prompt", "goes_on"),
    [
        ({}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, False, True),
    ],
)
def test_the_last_message_is_continued_only_when_asked(server, flags, prompt, goes_on):
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    assert server.post(CHAT, {"model": "fake", "messages": messages, **flags}).status_code == 200
    options = server.llm.render_options
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (prompt, goes_on)


def test_tools_are_taken_where_they_ask_for_nothing(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    plain = server.chat().json()["usage"]["prompt_tokens"]
    for fields in ({"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [tool], "tool_choice": "none"}):
        assert server.chat(**fields).json()["usage"]["prompt_tokens"] == plain


def test_token_ids_are_returned_on_request(server):
    body = server.chat(return_token_ids=True, max_tokens=2).json()
    assert body["prompt_token_ids"] == list(b"[user]Hi")
    assert body["choices"][0]["token_ids"] == list(b"An")
    chunks = events(server.chat(return_token_ids=True, max_tokens=2, stream=True))[:-1]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == list(b"An")
    assert [c.get("prompt_token_ids") for c in chunks] == [list(b"[user]Hi")] + [None] * (len(chunks) - 1)


def test_a_choice_that_fails_in_the_engine_is_an_error_event_and_no_finish(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer(fail_after=3)))
    stream = events(server.chat(stream=True))
    assert stream[-1]["error"]["message"] == "a NaN in this row"
    assert all(c["choices"][0]["finish_reason"] is None for c in stream[:-1])
    with pytest.raises(APIError, match="NaN"):
        list(server.openai.chat.completions.create(model="fake", messages=HI, stream=True))
    plain = server.chat()
    assert (plain.status_code, plain.json()["error"]["type"]) == (500, "server_error")
