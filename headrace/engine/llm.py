# SPDX-License-Identifier: Apache-2.0
"""LLM: the engine for plain Python. A facade over `AsyncLLM`, which it runs on an event loop in a thread of its own.

So it works the same in a script (no `__main__` guard: the core is never started by importing the user's module), in a
notebook, whose event loop is already running, and inside asyncio.
"""

import asyncio
import atexit
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM, RequestStream
from headrace.engine.input_processor import Prompt
from headrace.engine.ipc import EngineInfo
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.kv_cache_retention import KvCacheRetentionConfig
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

T = TypeVar("T")
Sampling = SamplingParams | Mapping[str, Any]
Retention = KvCacheRetentionConfig | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

SUBMIT_EVERY = 64
"""Prompts are sent in groups of so many, so that the first run while the last are tokenized."""


class LLM:
    """A model, loaded and ready. A context manager; `shutdown` frees it."""

    def __init__(self, model: str | Path | None = None, *, args: LlmArgs | None = None, **settings: Any) -> None:
        """Load a model (seconds to minutes; a bar on stderr shows how far it is).

        Args:
            model: a Hugging Face folder, a .gguf file, a Hub id, or "demo".
            args: all settings as one object, in place of `model` and keyword arguments.
            settings: fields of `LlmArgs`.

        Raises:
            ConfigError, ModelLoadError: what to change, in one sentence.
        """
        if args is None:
            if model is not None:
                settings["model"] = str(model)
            args = LlmArgs(**settings)
        self._engine = AsyncLLM(args)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-llm", daemon=True)
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self.shutdown()
            raise
        # After the core's own, so that it runs before it.
        atexit.register(_shutdown, weakref.ref(self))

    @property
    def args(self) -> LlmArgs:
        """The settings it was made with."""
        return self._engine.args

    @property
    def info(self) -> EngineInfo:
        """What it settled on: max_seq_len, num_blocks, device, ..."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """encode, decode, render_chat."""
        return self._engine.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        inputs: str | list[int] | Mapping[str, Any],
        sampling_params: Sampling | None = None,
        use_tqdm: bool = True,
        *,
        kv_cache_retention_config: Retention | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        inputs: Sequence[str] | Sequence[list[int]] | Sequence[Mapping[str, Any]],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        use_tqdm: bool = True,
        *,
        kv_cache_retention_config: Retention | Sequence[Retention] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]: ...
    def generate(
        self,
        inputs: Any,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        use_tqdm: bool = True,
        *,
        kv_cache_retention_config: Retention | Sequence[Retention] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete one prompt, or a list of prompts in the order given.

        Args:
            inputs: text, token ids or a dict as `AsyncLLM.generate` takes it; or a list of these.
            sampling_params: for all, or a list with one for each.
            use_tqdm: show a progress bar on stderr for lists (TensorRT-LLM's name).
            kv_cache_retention_config: how long their blocks should stay cached; for all, or one for each.
            cache_salt: prompts share cached prefixes only under the same salt; for all, or one for each.

        Raises:
            RequestError, ContextLengthError: a prompt that cannot run; then none does.
            EngineDeadError: the engine is gone.
        """
        is_one = _is_one(inputs)
        prompts = [inputs] if is_one else list(inputs)
        options = _options(len(prompts), sampling_params, kv_cache_retention_config, cache_salt)
        outputs = self._complete(prompts, options, use_tqdm and not is_one)
        return outputs[0] if is_one else outputs

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: Sampling | None = None,
        streaming: bool = True,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        kv_cache_retention_config: Retention | None = None,
    ) -> "RequestHandle":
        """Submit one prompt and return at once.

        `await` the handle for the final output, iterate it (`async for`, or `for` outside asyncio) for a stream of
        cumulative ones, or call its `result()`. Without `streaming`, iterating gives the final output alone.

        Raises:
            RequestError, ContextLengthError, EngineDeadError: as `AsyncLLM.generate`.
        """
        stream = self._engine.generate(
            inputs,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            kv_cache_retention_config=kv_cache_retention_config,
        )
        self._loop.call_soon_threadsafe(stream.submit)
        return RequestHandle(stream, self._loop, streaming)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_retention_config: Retention | Sequence[Retention] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a chat, or a list of chats: messages through the model's chat template, then `generate`.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self._engine.render_chat(
                chat,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for chat in chats
        ]
        options = _options(len(prompts), sampling_params, kv_cache_retention_config, cache_salt)
        outputs = self._complete(prompts, options, use_tqdm and not is_one)
        return outputs[0] if is_one else outputs

    def get_stats(self) -> dict[str, Any]:
        """The engine's counters. Reading consumes nothing."""
        return self._run(self._engine.get_stats())

    def get_kv_cache_events(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """The KV cache events that this object has not given yet (`AsyncLLM.get_kv_cache_events`).

        Args:
            timeout: seconds to wait for one where there is none; None: do not wait.

        Raises:
            RequestError: `kv_cache_config.event_buffer_max_size` is 0.
        """
        return self._run(self._engine.get_kv_cache_events(timeout))

    async def get_kv_cache_events_async(self, timeout: float | None = None) -> AsyncIterator[dict[str, Any]]:
        """The same one by one (`async for`), until none has come for `timeout` seconds."""
        while True:
            read = self._engine.get_kv_cache_events(timeout)
            events = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read, self._loop))
            if not events:
                return
            for event in events:
                yield event

    def shutdown(self) -> None:
        """Stop the engine and free its memory. Any number of times."""
        if self._loop.is_closed() or self._pid != os.getpid():
            return
        if self._thread.is_alive():
            done: Future[None] = Future()
            self._loop.call_soon_threadsafe(self._stop, done)
            done.result()
            self._thread.join()
        self._loop.close()

    def _stop(self, done: "Future[None]") -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        try:
            self._engine.shutdown()
        finally:
            # Cancelled tasks end on the next turn, before the loop stops on the one after.
            self._loop.call_soon(self._loop.call_soon, self._loop.stop)
            done.set_result(None)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # No loop where __init__ refused the settings; no running threads at the interpreter's end.
        if "_loop" in self.__dict__ and not sys.is_finalizing():
            self.shutdown()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _complete(self, prompts: list[Any], options: list[dict[str, Any]], shows_progress: bool) -> list[RequestOutput]:
        """Run prompts together; outputs in their order. One that cannot run takes the others down with it.

        options: of each prompt, what `AsyncLLM.generate` takes by name.
        """
        streams: list[RequestStream] = []
        waiting: list[Future[list[RequestOutput]]] = []
        with _Bar(len(prompts), shows_progress) as bar:
            try:
                for prompt, its_options in zip(prompts, options, strict=True):
                    streams.append(self._engine.generate(prompt, **its_options))
                    if len(streams) % SUBMIT_EVERY == 0:
                        waiting.append(self._submit(streams[-SUBMIT_EVERY:], bar))
                rest = len(streams) % SUBMIT_EVERY
                if rest:
                    waiting.append(self._submit(streams[-rest:], bar))
                return [output for group in waiting for output in group.result()]
            except BaseException:
                # The groups first, so that none is told of an end that nobody waits for any more.
                for group in waiting:
                    group.cancel()
                if not self._loop.is_closed():
                    for stream in streams:
                        self._loop.call_soon_threadsafe(stream.close)
                raise

    def _submit(self, streams: list[RequestStream], bar: "_Bar") -> "Future[list[RequestOutput]]":
        async def finals() -> list[RequestOutput]:
            # All of a group leave for the core together.
            for stream in streams:
                stream.submit()
            return await asyncio.gather(*(final(stream) for stream in streams))

        async def final(stream: RequestStream) -> RequestOutput:
            output = await stream.final()
            bar.advance(output)
            return output

        return asyncio.run_coroutine_threadsafe(finals(), self._loop)


def _shutdown(reference: "weakref.ref[LLM]") -> None:
    """At the interpreter's exit, while its threads still run."""
    llm = reference()
    if llm is not None:
        llm.shutdown()


class RequestHandle:
    """A submitted request, read from any thread or event loop. Dropping the last reference to it aborts the request."""

    def __init__(self, stream: RequestStream, loop: asyncio.AbstractEventLoop, streaming: bool) -> None:
        self._stream = stream
        self._loop = loop
        self._streaming = streaming

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until the end and return the final output.

        Raises:
            TimeoutError: after `timeout` seconds; the request goes on.
            EngineError: the request failed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(self._stream.final(), self._loop).result(timeout)
        except FutureTimeoutError:
            # Another class before Python 3.11.
            raise TimeoutError(f"request {self.request_id} has not ended within {timeout} s") from None

    def abort(self) -> None:
        """End the request; readers get what there is."""
        self._loop.call_soon_threadsafe(self._stream.abort)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        future = asyncio.run_coroutine_threadsafe(self._stream.final(), self._loop)
        return asyncio.wrap_future(future).__await__()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            output = await asyncio.wrap_future(self._next())
            if output is None:
                return
            yield output

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            output = self._next().result()
            if output is None:
                return
            yield output

    def _next(self) -> "Future[RequestOutput | None]":
        return asyncio.run_coroutine_threadsafe(_next(self._stream, self._streaming), self._loop)


async def _next(stream: RequestStream, streaming: bool) -> RequestOutput | None:
    if streaming or stream.is_read:
        return await anext(stream, None)
    return await stream.final()


class _Bar:
    """Prompts done, and output tokens per second, on stderr."""

    def __init__(self, total: int, is_shown: bool) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bars.add_task("", total=total, rate="")
        self._num_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        elapsed = self._bars.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:.0f} tok/s" if elapsed > 0 else ""
        self._bars.update(self._task, advance=1, rate=rate)

    def __enter__(self) -> "_Bar":
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()


def _is_one(inputs: Any) -> bool:
    """Whether this is a prompt and not a list of prompts."""
    if isinstance(inputs, (str, Mapping)):
        return True
    if not isinstance(inputs, Sequence):
        raise RequestError(f"inputs must be a prompt or a list of prompts, but is a {type(inputs).__name__}.")
    return len(inputs) > 0 and isinstance(inputs[0], int)


def _options(
    count: int,
    sampling_params: Sampling | Sequence[Sampling] | None,
    retention: Retention | Sequence[Retention] | None,
    cache_salt: str | Sequence[str] | None,
) -> list[dict[str, Any]]:
    """What each of `count` prompts is asked with, by the names of `AsyncLLM.generate`."""
    given = {
        "sampling_params": _one_each("sampling_params", sampling_params, count),
        "kv_cache_retention_config": _one_each("kv_cache_retention_config", retention, count),
        "cache_salt": _one_each("cache_salt", cache_salt, count),
    }
    return [{name: values[index] for name, values in given.items()} for index in range(count)]


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """`value` for each of `count` prompts, where it is not a list with one for each."""
    if value is None or isinstance(value, (str, Mapping, BaseModel)):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"There are {count} prompts and {len(value)} {name}; give one, or one for each.", param=name)
    return list(value)
