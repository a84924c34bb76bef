# SPDX-License-Identifier: Apache-2.0
"""Load on an engine of this program's own: token ids in, token ids out, no HTTP and no text in between."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bench.dataset import BenchRequest
from headrace.bench.load import Load, Record, TargetGoneError, now
from headrace.bench.workload import Lengths, random_requests, units_of
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineDeadError, HeadraceError
from headrace.sampling_params import SamplingParams

TRACE_MARGIN = 16
"""Output tokens of a traced request beyond the steps of the trace."""
TRACE_FILL_S = 120.0
"""What traced requests get to come to their first token."""
SETTLE_S = 60.0
"""What an engine gets to use idle time up."""
FIRST_TRACED_SEED = 1 << 40
"""Seeds of traced and warming prompts: no workload has them."""


class EngineTarget:
    """An `AsyncLLM` as a target."""

    def __init__(self, llm: AsyncLLM, temperature: float, ignore_eos: bool, streaming: bool) -> None:
        """streaming: time each piece of an answer; without it only its end, which costs the front end less."""
        self._llm = llm
        self._settings = {"temperature": temperature, "ignore_eos": ignore_eos, "detokenize": False}
        self._params: dict[int, SamplingParams] = {}
        self._streaming = streaming

    async def run(self, record: Record) -> None:
        request = record.request
        params = self._params.get(request.output_tokens)
        if params is None:
            params = SamplingParams(max_tokens=request.output_tokens, **self._settings)
            self._params[request.output_tokens] = params
        record.started = now()
        try:
            stream = self._llm.generate(list(request.input_ids or ()), params, cumulative=False)
            if self._streaming:
                async for output in stream:
                    record.arrivals.append(now())
                    record.num_output += len(output.outputs[0].token_ids_diff)
            else:
                output = await stream.final()
                record.num_output = len(output.outputs[0].token_ids)
        except EngineDeadError as error:
            raise TargetGoneError(error.message) from None
        except HeadraceError as error:
            record.error, record.ended = error.message, now()
            return
        record.ended = now()
        record.num_cached = output.num_cached_tokens
        if output.outputs[0].finish_reason == "error":
            record.error = output.outputs[0].error or "the request failed inside the engine"


async def settle(llm: AsyncLLM, say: Callable[[str], None]) -> None:
    """Wait until the engine has done what it puts off to idle time, so that no level begins with less than a later one.

    CUDA graphs and plans of long prompts, where they did not fit into the start.
    """
    begun = now()
    while (await llm.get_stats())["has_idle_work"]:
        if now() - begun > SETTLE_S:
            say(f"The engine still uses idle time after {SETTLE_S:.0f} s: the first level runs beside that.")
            return
        await asyncio.sleep(0.05)


async def run_level(target: EngineTarget, llm: AsyncLLM, load: Load) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a level; the engine's counters before and after it."""
    # What is there stays, and no collection of it falls into the run.
    gc.collect()
    gc.freeze()
    before = await llm.get_stats()
    await load.run()
    return before, await llm.get_stats()


async def warm_up(
    llm: AsyncLLM, target: EngineTarget, count: int, concurrency: int, input_len: int, output_len: int
) -> None:
    """Requests that are not counted, unlike any that are."""
    requests = random_requests(count, Lengths(input_len), Lengths(output_len), llm.info.vocab_size, FIRST_TRACED_SEED)
    await Load(target, units_of(requests), [0.0] * count, concurrency).run()


async def trace_level(llm: AsyncLLM, concurrency: int, input_len: int, num_steps: int, number: int) -> dict[str, Any]:
    """Keep `concurrency` sequences decoding and trace the device over `num_steps` steps of nothing else.

    number: of the trace; each has prompts of its own. Sequences that the engine cannot run at once are left out.
    """
    info = llm.info
    count, longest = min(concurrency, info.max_batch_size), info.max_seq_len
    output_len = min(longest // 2, num_steps + TRACE_MARGIN + _prefill_steps(llm, count, input_len))
    input_len = min(input_len, longest - output_len)
    count = max(1, min(count, info.num_blocks * info.tokens_per_block // (input_len + output_len)))
    seed = FIRST_TRACED_SEED + 1 + number
    requests = random_requests(count, Lengths(input_len), Lengths(output_len), info.vocab_size, seed)
    decoding = asyncio.Event()
    num_begun = 0

    async def follow(request: BenchRequest) -> None:
        nonlocal num_begun
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        has_begun = False
        async for _ in llm.generate(list(request.input_ids or ()), params, cumulative=False):
            num_begun += not has_begun
            has_begun = True
            if num_begun == count:
                decoding.set()

    tasks = [asyncio.ensure_future(follow(request)) for request in requests]
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(decoding.wait(), TRACE_FILL_S)
        summary = await llm.trace(num_steps)
    finally:
        await _stop(tasks)
    return {"sequences": num_begun, "input_len": input_len, **summary}


def _prefill_steps(llm: AsyncLLM, count: int, input_len: int) -> int:
    """Steps that early sequences may make while the prompts of late ones are computed, and some to spare."""
    per_step = max(1, llm.info.max_num_tokens // 8)
    return 2 * count * input_len // per_step + 64


async def _stop(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
