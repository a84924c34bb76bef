# SPDX-License-Identifier: Apache-2.0
"""Deltas to outputs: the same text whatever the steps, stop strings, end tokens, log-probabilities."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import CONFIG, EOS

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.core.output import RequestDelta, TokenLogprobs
from headrace.engine.input_processor import InputProcessor
from headrace.engine.ipc import Abort, Finish
from headrace.engine.output_processor import OutputProcessor, RequestState
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import EngineDeadError, EngineError
from headrace.outputs import CompletionOutput
from headrace.sampling_params import SamplingParams
from headrace.utils.hub import ModelSource


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("hf", model_folder, "m", "m"), LlmArgs(model="m"))


class Harness:
    """One request, fed by hand."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        inputs = InputProcessor(ModelConfig.from_hf(CONFIG), 256, tokenizer, {}, 0, "fe")
        self.outputs = OutputProcessor()
        self.state: RequestState = self.outputs.add(inputs.prepare("abc", SamplingParams(**params)), tokenizer)
        self.seen = ""
        self.replies: list[Finish | Abort] = []

    def feed(self, token_ids: list[int], finish: str | None = None, choice: int = 0, **more: Any) -> None:
        core_id = self.state.choices[choice].core_id
        self.replies += self.outputs.process([RequestDelta(core_id, token_ids, finish, **more)])

    def take(self) -> CompletionOutput:
        output = self.state.take()
        assert output is not None
        self.seen += output.outputs[0].text_diff
        assert output.outputs[0].text == self.seen
        return output.outputs[0]


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    text=st.text("abé世", max_size=15),
    stops=st.lists(st.text("abé世", min_size=1, max_size=3), max_size=3),
    includes=st.booleans(),
)
def test_any_steps_give_the_same_answer(
    tokenizer: Tokenizer, data: st.DataObject, text: str, stops: list[str], includes: bool
) -> None:
    ids = list(text.encode())
    answers = []
    for how in range(2):
        harness = Harness(tokenizer, stop=stops, include_stop_str_in_output=includes, max_tokens=len(ids) or 1)
        edges = (
            [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))), len(ids)] if how else [0, len(ids)]
        )
        for a, b in pairwise(edges):
            if harness.state.is_finished:
                break
            harness.feed(ids[a:b], "length" if b == len(ids) else None)
            harness.take()
            if not includes:
                assert not any(stop in harness.seen for stop in stops)
        last = harness.state.choices[0].take()
        answers.append((last.text, last.token_ids, last.finish_reason, last.stop_reason, harness.seen))
    assert answers[0] == answers[1]
    if not any(stop in text for stop in stops):
        assert answers[0][0] == text and answers[0][2] == "length"


def test_a_stop_string_tells_the_core_how_many_tokens_count(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, stop="cd", logprobs=0)
    said = [TokenLogprobs([i], [-1.0], [1]) for i in b"abcdef"]
    harness.feed(list(b"abcdef"), logprobs=said)
    (reply,) = harness.replies
    assert isinstance(reply, Finish) and reply.num_output_tokens == 4
    answer = harness.take()
    assert (answer.text, answer.token_ids, answer.cumulative_logprob) == ("ab", list(b"abcd"), -4.0)
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    # The core was a step ahead.
    harness.feed(list(b"gh"))
    assert harness.state.take() is None and harness.outputs.num_requests == 0


def test_text_that_may_begin_a_stop_string_waits_and_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, stop="xyz")
    harness.feed(list(b"a xy"))
    assert harness.take().text == "a "
    harness.feed(list(b"!"))
    assert harness.take().text_diff == "xy!"
    harness.feed(list(b"xy"), "length")
    assert harness.take().text == "a xy!xy"


def test_no_stop_string_before_min_tokens(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, stop="a", min_tokens=3)
    harness.feed(list(b"abcb"))
    assert harness.take().text == "abcb" and not harness.replies
    harness.feed(list(b"a"))
    assert harness.take().finish_reason == "stop" and harness.seen == "abcb"


@pytest.mark.parametrize(("includes", "text"), [(False, "ab"), (True, "abz")])
def test_the_token_that_ends_an_answer_counts_and_does_not_show(
    tokenizer: Tokenizer, includes: bool, text: str
) -> None:
    harness = Harness(tokenizer, stop_token_ids=[ord("z")], include_stop_str_in_output=includes)
    harness.feed(list(b"a"))
    harness.take()
    harness.feed(list(b"bz"), "stop", stop_reason=ord("z"))
    answer = harness.take()
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, list(b"abz"), ord("z"))


@pytest.mark.parametrize(("skips", "text"), [(True, "ab"), (False, "a<|start|>b")])
def test_special_tokens_show_where_they_are_asked_for(tokenizer: Tokenizer, skips: bool, text: str) -> None:
    harness = Harness(tokenizer, skip_special_tokens=skips)
    harness.feed([97, 256, 98, EOS], "stop")
    assert harness.take().text == text


def test_without_detokenize_there_is_no_text(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, detokenize=False)
    harness.feed([97, 98], "length")
    answer = harness.take()
    assert (answer.text, answer.token_ids) == ("", [97, 98])


def test_a_request_ends_when_its_last_choice_does(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, n=2)
    harness.feed([97], "stop", choice=0)
    output = harness.state.take()
    assert output is not None and not output.finished and output.outputs[0].finish_reason == "stop"
    harness.feed([98], "length", choice=1)
    output = harness.state.take()
    assert output is not None and output.finished and output.outputs[0].token_ids_diff == []
    assert harness.outputs.num_requests == 0


def test_a_failed_choice_fails_the_request_and_aborts_the_others(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, n=2)
    harness.feed([], "error", choice=0, error="a row of NaN")
    (reply,) = harness.replies
    assert isinstance(reply, Abort) and harness.state.choices[1].core_id in reply.request_ids
    with pytest.raises(EngineError, match="a row of NaN"):
        harness.state.take()


def test_without_cumulative_only_the_last_output_is_whole(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, logprobs=0)

    def take(text: bytes, finish: str | None = None) -> CompletionOutput:
        harness.feed(list(text), finish, logprobs=[TokenLogprobs([i], [-1.0], [1]) for i in text])
        output = harness.state.take(cumulative=False)
        assert output is not None
        return output.outputs[0]

    for text in (b"ab", b"c"):
        part = take(text)
        assert (part.text, part.token_ids, part.logprobs) == ("", [], None)
        assert (part.text_diff, part.token_ids_diff) == (text.decode(), list(text)) and part.logprobs_diff is not None
    last = take(b"d", "length")
    assert (last.text, last.token_ids, last.text_diff) == ("abcd", list(b"abcd"), "d")
    assert last.logprobs is not None and len(last.logprobs) == 4 and last.cumulative_logprob == -4.0


def test_everyone_who_waits_hears_of_the_end(tokenizer: Tokenizer) -> None:
    async def go() -> None:
        harness = Harness(tokenizer)
        waiters = [asyncio.ensure_future(harness.state.wait_end()), asyncio.ensure_future(harness.state.wait())]
        await asyncio.sleep(0)
        harness.outputs.fail_all(EngineDeadError("gone"))
        await asyncio.wait_for(asyncio.gather(*waiters), 1)
        with pytest.raises(EngineDeadError):
            harness.state.take()

    asyncio.run(go())
