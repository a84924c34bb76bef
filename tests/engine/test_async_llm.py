# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM over a fake worker: streams, aborts, errors, several front ends. The core runs in a thread here."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions
from headrace.errors import ContextLengthError, EngineDeadError, EngineError, RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.utils.phases import Phases

Engine = Callable[..., Any]
Run = Callable[..., None]
TEXT = "A 世界 👩‍👩‍👧‍👦 é"


async def read(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


async def is_idle(llm: AsyncLLM) -> None:
    """Wait until the core has nothing left, and no block is in use."""
    while True:
        stats = await llm.get_stats()
        if stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0:
            return
        await asyncio.sleep(0.01)


def test_deltas_add_up_to_the_text_and_show_no_broken_character(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            count = len(TEXT.encode())
            outputs = await read(llm.generate(TEXT, SamplingParams(max_tokens=count)))
            choices = [output.outputs[0] for output in outputs]
            assert "".join(choice.text_diff for choice in choices) == choices[-1].text == TEXT
            assert all("\ufffd" not in choice.text for choice in choices)
            assert [i for choice in choices for i in choice.token_ids_diff] == list(TEXT.encode())
            assert choices[-1].finish_reason == "length" and outputs[-1].finished
            assert all(choice.finish_reason is None for choice in choices[:-1])
            assert len(choices) > count // 2, "it streams"

    run(go())


def test_a_slow_reader_gets_everything_once(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            stream = llm.generate("abcdefgh", SamplingParams(max_tokens=50, logprobs=1))
            text, num_logprobs, count = "", 0, 0
            async for output in stream:
                await asyncio.sleep(0.05)
                text += output.outputs[0].text_diff
                num_logprobs += len(output.outputs[0].logprobs_diff or [])
                count += 1
            assert text == ("abcdefgh" * 7)[:50]
            assert num_logprobs == 50
            assert count < 40

    run(go())


def test_many_streams_at_once_each_get_their_own(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            prompts = [f"{i}: text" for i in range(40)]
            finals = await asyncio.gather(*(llm.generate(p, SamplingParams(max_tokens=20)).final() for p in prompts))
            for prompt, output in zip(prompts, finals, strict=True):
                assert output.outputs[0].text == (prompt * 20)[:20]
                assert output.prompt == prompt and output.prompt_token_ids == list(prompt.encode())
            await is_idle(llm)

    run(go())


def test_n_choices_come_together(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            outputs = await read(llm.generate("xyz", SamplingParams(max_tokens=6, n=3)))
            assert [choice.index for choice in outputs[-1].outputs] == [0, 1, 2]
            for index in range(3):
                assert "".join(output.outputs[index].text_diff for output in outputs) == "xyzxyz"
            assert not any(output.finished for output in outputs[:-1]) and outputs[-1].finished

    run(go())


def test_a_stop_string_across_tokens_never_shows(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            stream = llm.generate("ABCDEFGHIJK", SamplingParams(max_tokens=100, stop=["DEFG", "XYZ"]))
            seen = ""
            async for output in stream:
                seen += output.outputs[0].text_diff
                assert "ABC".startswith(seen)
            choice = output.outputs[0]
            assert seen == choice.text == "ABC"
            assert (choice.finish_reason, choice.stop_reason) == ("stop", "DEFG")
            assert choice.token_ids == list(b"ABCDEFG"), "the tokens up to the one that completes it"
            await is_idle(llm)

    run(go())


def test_closing_a_stream_frees_its_request(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            stream = llm.generate("abc", SamplingParams(max_tokens=400))
            await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await is_idle(llm)
            assert llm.num_requests == 0

    run(go())


def test_dropping_a_stream_frees_its_request(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            async for _ in llm.generate("abc", SamplingParams(max_tokens=400)):
                break
            gc.collect()
            await asyncio.wait_for(is_idle(llm), 5)

    run(go())


def test_cancelling_a_reader_frees_its_request(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            task = asyncio.ensure_future(llm.generate("abc", SamplingParams(max_tokens=400)).final())
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            await asyncio.wait_for(is_idle(llm), 5)

    run(go())


def test_abort_ends_the_stream_with_what_there_is(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            stream = llm.generate("abc", SamplingParams(max_tokens=400), request_id="mine")
            await anext(stream)
            await llm.abort("mine")
            await llm.abort("mine")
            rest = await read(stream)
            assert rest[-1].outputs[0].finish_reason == "cancelled" and rest[-1].finished
            await is_idle(llm)

    run(go())


def test_bad_requests_are_refused_at_the_call_and_others_go_on(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            good = asyncio.ensure_future(llm.generate("abc", SamplingParams(max_tokens=100)).final())
            for prompt, params, error in (
                ("", {}, RequestError),
                ([], {}, RequestError),
                ([300], {}, RequestError),
                ([-1], {}, RequestError),
                ([1.5], {}, RequestError),
                (None, {}, RequestError),
                ({"text": "x"}, {}, RequestError),
                ("x" * 512, {}, ContextLengthError),
                ("x" * 500, {"max_tokens": 13}, ContextLengthError),
                ("x", {"max_tokens": -1}, RequestError),
                ("x", {"temperature": float("nan")}, RequestError),
                ("x", {"stop": ["a"] * 10_000}, RequestError),
                ("x", {"logit_bias": {300: 1.0}}, RequestError),
                ("x", {"stop_token_ids": [-1]}, RequestError),
            ):
                with pytest.raises(error):
                    llm.generate(prompt, params)
            assert len((await good).outputs[0].token_ids) == 100
            await is_idle(llm)

    run(go())


def test_a_request_id_in_use_is_refused(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            stream = llm.generate("abc", request_id="a")
            await anext(stream)
            with pytest.raises(RequestError, match="in use"):
                llm.generate("abc", request_id="a")
            await stream.aclose()
            again = await llm.generate("abc", SamplingParams(max_tokens=2), request_id="a").final()
            assert again.outputs[0].text == "ab"

    run(go())


def test_a_row_that_fails_ends_its_request_alone(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("FailsOneRow") as llm:
            good = asyncio.ensure_future(llm.generate("abc", SamplingParams(max_tokens=50)).final())
            with pytest.raises(EngineError, match="not numbers"):
                await llm.generate("!bc", SamplingParams(max_tokens=50)).final()
            assert len((await good).outputs[0].token_ids) == 50
            assert llm.is_alive
            await is_idle(llm)

    run(go())


def test_log_probabilities_have_one_entry_a_token(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            params = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=1)
            output = await llm.generate("abcé" * 30, params).final()
            choice = output.outputs[0]
            assert choice.logprobs is not None and len(choice.logprobs) == 5
            assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
            assert choice.cumulative_logprob == pytest.approx(-2.5)
            assert choice.logprobs[0][ord("a")].decoded_token == "a"
            assert choice.logprobs[3][0xC3].decoded_token == "\ufffd"
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 150
            assert output.prompt_logprobs[0] is None
            said = [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry]
            assert said == output.prompt_token_ids[1:]

    run(go())


def test_the_core_serves_any_number_of_front_ends(engine: Engine, args: LlmArgs, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            others = [AsyncLLM(args) for _ in range(2)]
            for other in others:
                await other.start(connect_to=llm.info.address)
            everyone = [llm, *others]
            streams = [one.generate(f"{i}..", SamplingParams(max_tokens=9)) for i, one in enumerate(everyone)]
            texts = [output.outputs[0].text for output in await asyncio.gather(*(s.final() for s in streams))]
            assert texts == ["0..0..0..", "1..1..1..", "2..2..2.."]
            # One leaves in the middle of a request: its request goes with it, the others' do not.
            long = others[0].generate("abc", SamplingParams(max_tokens=400))
            await anext(long)
            others[0].shutdown()
            with pytest.raises(EngineDeadError):
                await anext(long)
            await asyncio.wait_for(is_idle(llm), 5)
            assert (await llm.get_stats())["num_front_ends"] == 2
            assert (await others[1].generate("xy", SamplingParams(max_tokens=2)).final()).outputs[0].text == "xy"
            others[1].shutdown()

    run(go())


def test_shutdown_fails_what_is_pending_and_may_be_repeated(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker") as llm:
            pending = asyncio.ensure_future(llm.generate("abc", SamplingParams(max_tokens=400)).final())
            await asyncio.sleep(0.1)
            llm.shutdown()
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await pending
            with pytest.raises(EngineDeadError):
                llm.generate("abc")
            assert not llm.is_alive
            await asyncio.wait_for(llm.dead.wait(), 1)

    run(go())


def test_cached_prefix_tokens_are_reported(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine() as llm:
            params = SamplingParams(max_tokens=2)
            first = await llm.generate("x" * 100, params).final()
            second = await llm.generate("x" * 100, params).final()
            salted = await llm.generate("x" * 100, params, cache_salt="other").final()
            assert (first.num_cached_tokens, second.num_cached_tokens, salted.num_cached_tokens) == (0, 96, 0)

    run(go())


def test_the_start_is_told_phase_by_phase_and_sums_to_its_time(
    args: LlmArgs, core_options: Callable[..., CoreOptions], caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    async def go() -> None:
        phases = Phases(time.monotonic() - 5.0)
        phases.end_of("imports")
        llm = AsyncLLM(args, core=core_options("FakeWorker", in_process=False), phases=phases)
        begun = time.monotonic()
        with caplog.at_level(logging.INFO, "headrace.engine.async_llm"):
            await llm.start()
        took = time.monotonic() - begun
        startup = llm.info.startup
        llm.shutdown()
        assert list(startup)[:4] == ["imports", "model's files", "core process", "imports of the worker"]
        assert list(startup)[-2:] == ["scheduler", "tokenizer, connecting"]
        assert all(seconds >= 0 for seconds in startup.values())
        assert sum(startup.values()) == pytest.approx(5.0 + took, abs=0.1)
        (total,) = [text.split()[-1] for text in caplog.messages if text.startswith("= total")]
        assert float(total) == pytest.approx(5.0 + took, abs=0.1)

    run(go())
