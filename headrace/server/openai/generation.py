# SPDX-License-Identifier: Apache-2.0
"""The engine's side of one HTTP request: its streams, merged; what is new in each; what it all came to."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import cast

from headrace.engine.async_llm import AsyncLLM, RequestStream
from headrace.errors import EngineError, RequestError
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.body import cancel
from headrace.server.openai.protocol.generation import FinishReason, GenerationRequest, PromptTokensDetails, Usage

# Above so many characters or tokens, encoding and checks leave the event loop (about 5 ms of work).
LONG_PROMPT = 20_000

EnginePrompt = str | list[int] | dict[str, object]


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer repeat."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Head":
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model)


@dataclass(slots=True)
class Delta:
    """What one choice grew by. A choice ends with a delta that has a finish reason and no text."""

    prompt_index: int
    choice_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Generation:
    """The streams for the prompts of one request. Close it, whatever happened: that aborts what still runs."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self.latest: list[RequestOutput | None] = [None] * len(streams)
        """The newest output of each prompt; whole at the end, on the way only what is new."""
        self._num_completion_tokens = 0

    def prompt_token_ids(self, prompt_index: int) -> list[int]:
        """A prompt as the engine runs it."""
        return self._streams[prompt_index].prompt_token_ids

    async def finals(self) -> list[RequestOutput]:
        """Wait for the end; one output a prompt, in the order of the prompts.

        Raises:
            EngineError: the engine died, or a choice failed in it.
        """
        outputs = await asyncio.gather(*(stream.final() for stream in self._streams))
        self.latest = list(outputs)
        for output in outputs:
            for choice in output.outputs:
                check_choice(choice)
                self._num_completion_tokens += choice.length
        return outputs

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes, over all prompts and choices.

        Raises:
            EngineError: the engine died, or a choice failed in it.
        """
        ended: set[tuple[int, int]] = set()
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self.latest[prompt_index] = output
                for choice in output.outputs:
                    key = (prompt_index, choice.index)
                    if key in ended:
                        continue
                    finish_reason = check_choice(choice)
                    self._num_completion_tokens += len(choice.token_ids_diff)
                    if choice.text_diff or choice.token_ids_diff:
                        yield Delta(*key, choice.text_diff, choice.token_ids_diff, choice.logprobs_diff)
                    if finish_reason is not None:
                        ended.add(key)
                        yield Delta(*key, finish_reason=finish_reason, stop_reason=choice.stop_reason)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        # One read in flight per stream: a slow client gets fewer, larger outputs, and no queue grows.
        reads = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(self._streams)}
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for read in sorted(done, key=reads.__getitem__):
                    index = reads.pop(read)
                    with suppress(StopAsyncIteration):
                        output = read.result()
                        reads[asyncio.ensure_future(anext(self._streams[index]))] = index
                        yield index, output
        finally:
            await cancel(*reads)

    def usage(self, num_completion_tokens: int | None = None) -> Usage:
        """Tokens so far: each prompt once, all choices of it."""
        outputs = [output for output in self.latest if output is not None]
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        if num_completion_tokens is None:
            num_completion_tokens = self._num_completion_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(o.num_cached_tokens for o in outputs)),
        )

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def check_choice(choice: CompletionOutput) -> FinishReason | None:
    """The choice's finish reason in OpenAI's words; None while it grows.

    Raises:
        EngineError: it ended without an answer.
    """
    reason = choice.finish_reason
    if reason in ("error", "cancelled"):
        raise EngineError(choice.error or "The request was ended by the server before it was complete.")
    return cast("FinishReason | None", reason)


async def open_generation(
    llm: AsyncLLM, head: Head, prompts: Sequence[EnginePrompt], params: SamplingParams, request: GenerationRequest
) -> Generation:
    """Validate everything and return the streams; nothing runs yet, so one bad prompt leaves no other behind.

    Raises:
        RequestError: with `param` naming the field.
        EngineDeadError: the engine is gone.
    """

    def prepare() -> list[RequestStream]:
        return [
            llm.generate(
                prompt,
                params,
                request_id=f"{head.id}-{index}",
                priority=request.priority,
                cache_salt=request.cache_salt,
                kv_cache_retention_config=request.kv_cache_retention_config,
                cumulative=False,
            )
            for index, prompt in enumerate(prompts)
        ]

    try:
        # A dict carries token ids that were checked on the way here.
        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, dict))
        streams = await asyncio.to_thread(prepare) if size > LONG_PROMPT else prepare()
    except RequestError as error:
        if error.param is None or error.param.startswith("prompt_token"):
            error.param = "prompt"
        raise
    return Generation(streams)
