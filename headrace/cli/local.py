# SPDX-License-Identifier: Apache-2.0
"""A model loaded by this program, for the commands that talk to it from a terminal."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineError
from headrace.sampling_params import SamplingParams
from headrace.utils.phases import Phases, process_began

Write = Callable[[str], None]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt."""

    text: str
    was_stopped: bool
    """By Ctrl-C."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None


class LocalModel:
    """An engine and its event loop, driven from ordinary code; use as a context manager.

    While an answer runs, Ctrl-C ends the answer and nothing else.
    """

    def __init__(self, args: LlmArgs) -> None:
        self._loop = asyncio.new_event_loop()
        phases = Phases(process_began())
        phases.end_of("imports")
        self._llm = AsyncLLM(args, phases=phases)

    def __enter__(self) -> "LocalModel":
        try:
            self._loop.run_until_complete(self._llm.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Any number of times."""
        if self._loop.is_closed():
            return
        self._llm.shutdown()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a chat is written."""
        return self._llm.tokenizer.chat_template is not None

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._llm.info.model_name

    def chat(self, messages: Sequence[Message], params: SamplingParams, write: Write) -> Answer:
        """Answer a chat, writing the text as it comes."""
        return self.answer(self._llm.render_chat(messages), params, write)

    def answer(self, prompt: str | list[int], params: SamplingParams, write: Write) -> Answer:
        """Continue a prompt, writing the text as it comes."""
        return self._interruptible(self._stream(prompt, params, write))

    async def _stream(self, prompt: str | list[int], params: SamplingParams, write: Write) -> Answer:
        stream = self._llm.generate(prompt, params, cumulative=False)
        text, num_prompt, num_output, reason = "", 0, 0, None
        try:
            async for output in stream:
                first = output.outputs[0]
                write(first.text_diff)
                text += first.text_diff
                num_output += len(first.token_ids_diff)
                reason = first.finish_reason
                num_prompt = len(output.prompt_token_ids)
                if reason == "error":
                    raise EngineError(first.error or "the request failed inside the engine")
        except asyncio.CancelledError:
            return Answer(text, True, num_prompt, num_output, "cancelled")
        finally:
            await stream.aclose()
        return Answer(text, False, num_prompt, num_output, reason)

    def _interruptible(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run to the end, with Ctrl-C cancelling the work rather than raising somewhere inside the loop."""
        task = self._loop.create_task(work)
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            # Stopped before the work had begun.
            return Answer("", True)
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
