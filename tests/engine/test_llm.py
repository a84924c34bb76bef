# SPDX-License-Identifier: Apache-2.0
"""The LLM facade: lists in order, handles, chats, and shutting down. The core runs in a thread here."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.engine.core_client import CoreOptions
from headrace.engine.llm import LLM
from headrace.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from headrace.sampling_params import SamplingParams


@pytest.fixture
def llm(args: LlmArgs, core_options: Callable[..., CoreOptions], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    options = core_options("SlowWorker", in_process=True)
    monkeypatch.setattr(CoreOptions, "from_environment", classmethod(lambda cls: options))
    with LLM(args=args) as engine:
        yield engine


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    assert llm.generate("ab", params).outputs[0].text == "abab"
    assert llm.generate([97, 98], params).outputs[0].text == "abab"
    assert llm.generate({"prompt_token_ids": [97]}, {"max_tokens": 2}).outputs[0].text == "aa"
    many = llm.generate(["ab", "cd"], params)
    assert [output.outputs[0].text for output in many] == ["abab", "cdcd"]
    assert [o.outputs[0].text for o in llm.generate([[97], [98, 99]], params)] == ["aaaa", "bcbc"]
    assert llm.generate([], params) == []


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=20 - i) for i in range(20)]
    outputs = llm.generate([f"{i}," for i in range(20)], params)
    assert [output.outputs[0].text for output in outputs] == [(f"{i}," * 20)[: 20 - i] for i in range(20)]
    with pytest.raises(RequestError, match="2 prompts and 3"):
        llm.generate(["a", "b"], params[:3])


def test_one_bad_prompt_stops_the_list_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate([*["abc"] * 100, ""], SamplingParams(max_tokens=200))
    end = time.monotonic() + 5
    while llm.get_stats()["num_running"] or llm.get_stats()["front_end"]["num_requests"]:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_handle_can_be_awaited_iterated_or_waited_for(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10)

    async def go() -> None:
        output = await llm.generate_async("abc", params)
        assert output.outputs[0].text == "abcabcabca" and output.finished
        pieces = [output.outputs[0].text_diff async for output in llm.generate_async("xyz", params)]
        assert "".join(pieces) == "xyzxyzxyzx" and len(pieces) > 2

    asyncio.run(go())
    assert "".join(o.outputs[0].text_diff for o in llm.generate_async("12", params)) == "1212121212"
    assert llm.generate_async("ab", params).result(10).outputs[0].text == "ababababab"
    with pytest.raises(TimeoutError):
        llm.generate_async("ab", SamplingParams(max_tokens=100)).result(0.05)
    whole = list(llm.generate_async("ab", params, streaming=False))
    assert [output.outputs[0].text for output in whole] == ["ababababab"]
    with pytest.raises(RequestError):
        llm.generate_async("")


def test_a_handle_can_be_aborted(llm: LLM) -> None:
    handle = llm.generate_async("ab", SamplingParams(max_tokens=400))
    next(iter(handle))
    handle.abort()
    assert handle.result(5).outputs[0].finish_reason == "cancelled"


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    user = [{"role": "user", "content": "hi"}]
    one = llm.chat(user, SamplingParams(max_tokens=4, skip_special_tokens=False))
    assert not isinstance(one, list) and one.outputs[0].text == "<|start|>use"
    many = llm.chat([user, [{"role": "user", "content": "you"}]], SamplingParams(max_tokens=4))
    assert isinstance(many, list) and len(many) == 2
    with pytest.raises(RequestError, match="no role bad"):
        llm.chat([{"role": "bad", "content": "x"}])


def test_it_works_while_another_event_loop_runs(llm: LLM) -> None:
    async def notebook() -> str:
        return llm.generate("ab", SamplingParams(max_tokens=3)).outputs[0].text

    assert asyncio.run(notebook()) == "aba"


def test_after_shutdown_it_says_so(llm: LLM) -> None:
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a")


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError):
        LLM("x", max_batch_sizes=3)
    with pytest.raises(ModelLoadError, match="does not exist"):
        LLM("/nowhere/model")
