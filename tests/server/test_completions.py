# SPDX-License-Identifier: Apache-2.0
"""/v1/completions as the `openai` client and the wire see it."""

import json

import pytest
from fake_engine import Answer, FakeLLM


def answer_by_prompt(prompt, choice):
    return Answer(f"<{prompt}:{choice}>" + "." * (10 - 4 * choice), tokens_per_step=2)


def chunks_of(response):
    return [json.loads(line[6:]) for line in response.text.split("\n") if line and line != "data: [DONE]"]


def test_the_client_gets_the_answer_and_sixteen_tokens_by_default(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("0123456789" * 3)))
    answer = server.openai.completions.create(model="fake", prompt="Hi")
    assert answer.choices[0].text == "0123456789012345"
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert set(server.complete().json()["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a", ["a"]), (["a", "bb"], ["a", "bb"]), ([97], ["a"]), ([[97], [98, 98], [99]], ["a", "bb", "c"])],
)
def test_index_is_prompt_times_n_plus_choice_in_every_form_of_prompt(serve, prompt, texts):
    server = serve(FakeLLM(answer=answer_by_prompt))
    expected = [f"<{text}:{choice}>" + "." * (10 - 4 * choice) for text in texts for choice in range(2)]
    whole = server.complete(prompt, n=2).json()["choices"]
    assert [c["index"] for c in whole] == list(range(len(expected)))
    assert [c["text"] for c in whole] == expected
    streamed, reasons = [""] * len(expected), [0] * len(expected)
    for chunk in chunks_of(server.complete(prompt, n=2, stream=True)):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] is not None
    assert streamed == expected
    assert reasons == [1] * len(expected)


def test_usage_counts_each_prompt_once_and_all_choices(serve):
    server = serve(FakeLLM(answer=lambda p, c: Answer("xy")))
    usage = server.complete(["aaa", "bb"], n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 12, 17)
    stream = chunks_of(server.complete(["aaa", "bb"], n=2, stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["usage"] == usage and stream[-1]["choices"] == []
    assert all(c["usage"] is None for c in stream[:-1])
    assert all("usage" not in c for c in chunks_of(server.complete(stream=True)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["\n1. Ana 世 has 20", list("né".encode())])
def test_echoed_logprobs_join_to_the_text_and_their_offsets_point_into_it(serve, prompt, stream):
    server = serve(FakeLLM(answer=lambda p, c: Answer(" apples é")))
    response = server.complete(prompt, echo=True, logprobs=1, stream=stream)
    if stream:
        pieces = [c["choices"][0] for c in chunks_of(response)]
        text = "".join(p["text"] for p in pieces)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {name: [x for p in pieces if p["logprobs"] for x in p["logprobs"][name]] for name in names}
    else:
        choice = response.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    given = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    assert text == given + " apples é"
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None and logprobs["token_logprobs"][1] == -1.5
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 1
    data = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", "")) if t.startswith("bytes:") else t.encode()
        for t in logprobs["tokens"]
    )
    assert data.decode() == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token


def test_logprobs_zero_gives_only_the_chosen_tokens(server):
    logprobs = server.complete(logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "n"],
        "token_logprobs": [-1.5, -1.5],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


def test_scoring_a_prompt_gives_it_back_without_an_answer(server):
    body = server.complete("abc", echo=True, max_tokens=0, logprobs=1).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = chunks_of(server.complete("abc", echo=True, max_tokens=0, **options))
    assert "".join(c["choices"][0]["text"] for c in stream[:-1]) == "abc"
    assert stream[-1]["usage"] == body["usage"]


def test_best_of_returns_the_most_probable_per_token(serve):
    llm = FakeLLM(answer=lambda p, c: Answer("x" * (c + 1)))
    plain = FakeLLM.position
    llm.position = lambda i, k: {j: type(e)(-0.1 if i == 256 else -1.0, 1, "") for j, e in plain(llm, i, k).items()}
    server = serve(llm)
    body = server.complete(n=1, best_of=3).json()
    assert [c["text"] for c in body["choices"]] == ["x"], "the end token weighs most in the shortest answer"
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 2 + 3 + 4, "all that were made are counted"


def test_prompt_logprobs_are_given_in_vllms_shape(server):
    choice = server.complete("ab", prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}]
    assert choice["logprobs"] is None


def test_a_batch_with_one_bad_prompt_fails_whole_and_leaves_nothing_running(server):
    before = len(server.llm.calls)
    for prompt in (["ok", ""], [[65], []], [[65], [300]], [[65], [-1]], ["ok", "x" * 300]):
        for stream in (False, True):
            response = server.complete(prompt, stream=stream)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not any(call.is_submitted for call in server.llm.calls[before:])


def test_ids_of_the_model_without_text_are_taken_up_to_the_last(server):
    assert server.complete([299]).status_code == 200
    assert server.complete([300]).status_code == 400


@pytest.mark.parametrize("echo", [True, False])
def test_a_stream_brings_each_prompts_ids_once(server, echo):
    text = server.complete(["Hi", "Yo"], stream=True, echo=echo, return_token_ids=True, max_tokens=2).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [chunk["choices"][0] for chunk in chunks]
    for index, prompt in enumerate(["Hi", "Yo"]):
        mine = [p for p in pieces if p["index"] == index]
        assert [p.get("prompt_token_ids") for p in mine] == [list(prompt.encode())] + [None] * (len(mine) - 1)
        assert [i for p in mine for i in p.get("token_ids", [])] == list(b"An")
