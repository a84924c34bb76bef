# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: the engine as an asyncio program sees it. The server, `LLM` and the command line are its clients.

    llm = AsyncLLM(model="demo")
    await llm.start()
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
        ...
    llm.shutdown()

All methods belong to the event loop that ran `start()`, but for `generate`'s and the tokenizer's work of validating
and encoding, which any thread may do.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from headrace.config.checkpoint import load_generation_config, load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.core.kv_events import EventPage, to_dict
from headrace.engine.core_client import CoreClient, CoreOptions
from headrace.engine.executor import ProgressCallback
from headrace.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from headrace.engine.ipc import (
    Dying,
    EngineInfo,
    GetStats,
    KvEvents,
    Outputs,
    ReadEvents,
    Stats,
    Submit,
    Trace,
)
from headrace.engine.output_processor import OutputProcessor, RequestState
from headrace.engine.progress import ProgressBars
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.kv_cache_retention import KvCacheRetentionConfig
from headrace.logger import get_logger
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.utils.hub import ModelSource, resolve_model
from headrace.utils.phases import Phases

logger = get_logger(__name__)
T = TypeVar("T")

EVENTS_PER_READ = 1000
EVENTS_POLL_S = 0.05
"""Between two looks of one who waits for KV cache events."""


class RequestStream(AsyncIterator[RequestOutput]):
    """The answer to one request as it grows.

    Iterating gives cumulative `RequestOutput`s with what is new since the last one in their `*_diff` fields (with
    `cumulative=False` nothing else, up to the last, which is whole); a slow reader gets fewer, larger ones. The request
    is submitted by the first `__anext__` or `final()`. Closing the stream, or dropping the last reference to it, aborts
    the request; cancelling one `__anext__` doesn't.

    Raises, while iterating: EngineDeadError when the engine dies, EngineError when this request fails inside it.
    """

    def __init__(self, llm: "AsyncLLM", prepared: PreparedRequest, cumulative: bool = True) -> None:
        self._llm = llm
        self._prepared = prepared
        self._cumulative = cumulative
        self._state: RequestState | None = None
        self._closed = False
        self._last: RequestOutput | None = None

    @property
    def request_id(self) -> str:
        """The id that `AsyncLLM.abort` takes and every output carries."""
        return self._prepared.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the engine runs it."""
        return self._prepared.prompt_token_ids

    @property
    def is_read(self) -> bool:
        """Whether the end has been taken, so that nothing more will come."""
        return self._closed or (self._state is not None and self._state.is_read)

    def submit(self) -> None:
        """Send the request to the core now, rather than at the first read. On the engine's loop; once."""
        if self._state is None and not self._closed:
            self._state = self._llm._submit(self._prepared)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        self.submit()
        state = self._state
        while state is not None and not self._closed:
            output = state.take(self._cumulative)
            if output is not None:
                self._last = output
                return output
            if state.is_finished:
                break
            await state.wait()
        raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """Wait for the end and return the whole answer (nothing is built on the way). Any number of times."""
        self.submit()
        state = self._state
        if state is None:
            raise RequestError(f"request {self.request_id} was closed before it was submitted")
        await state.wait_end()
        self._last = state.take() or self._last
        assert self._last is not None
        return self._last

    async def aclose(self) -> None:
        """Abort the request if it still runs, and end the stream. Any number of times."""
        self.close()

    def close(self) -> None:
        """What `aclose` does, without waiting. On the engine's loop."""
        if not self._closed:
            self._closed = True
            if self._state is not None and not self._state.is_finished:
                self._llm._drop(self._state)

    def abort(self) -> None:
        """End the request; readers get what there is, with finish_reason "cancelled". On the engine's loop."""
        if self._state is None:
            self.close()
        else:
            self._llm._drop(self._state)

    def __del__(self) -> None:
        if not self._closed and self._state is not None and not self._state.is_finished:
            self._llm._drop_threadsafe(self._state)


async def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`asyncio.to_thread`, but a program that is interrupted does not wait for a download to end before it exits."""
    loop = asyncio.get_running_loop()
    answer: Future[T] = Future()
    done = asyncio.Event()

    def work() -> None:
        try:
            answer.set_result(function(*args, **kwargs))
        except BaseException as error:
            answer.set_exception(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, daemon=True).start()
    await done.wait()
    return answer.result()


class AsyncLLM:
    """An engine: a core process with a model, and this front end that tokenizes, streams and detokenizes."""

    info: EngineInfo
    """What the engine is and what it settled on. After `start()`."""
    dead: asyncio.Event
    """Set when the engine has died or was shut down; `dead_reason` says why. After `start()`."""

    def __init__(
        self,
        args: LlmArgs | None = None,
        *,
        core: CoreOptions | None = None,
        phases: Phases | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            args: the settings; or give them as keyword arguments (`model="demo", max_batch_size=8`).
            core: how the core is started; by default a process of its own.
            phases: of the program's start so far; None: the start begins with `start()`.

        Raises:
            ConfigError: an unknown or impossible setting.
        """
        self.args = args if args is not None else LlmArgs(**settings)
        self._core = core if core is not None else CoreOptions.from_environment()
        self._phases = phases
        self._client: CoreClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor()
        self._receiver: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._next_event = 0
        self._reads_events = asyncio.Lock()
        self._death_callbacks: list[Callable[[str], None]] = []
        self._dead_reason: str | None = None
        self._stopping = False

    async def start(self, on_progress: ProgressCallback | None = None, connect_to: str | None = None) -> None:
        """Find the model, start the core process, load, and return when requests can be sent.

        Args:
            on_progress: called with (label, done, total) while weights load, on another thread; without it a bar is
                drawn on stderr.
            connect_to: join the core at this address (`EngineInfo.address`) in place of starting one; `args` names
                the same model.

        Raises:
            ConfigError, ModelLoadError: what the user must change, in one sentence.
            EngineDeadError: the core process died while starting.
        """
        self._loop = asyncio.get_running_loop()
        self.dead = asyncio.Event()
        phases = self._phases or Phases()
        args = self.args
        source = await _in_thread(resolve_model, args.model, args.revision, need_weights=args.load_format != "dummy")
        # First the small files, whose mistakes are cheap to find; then the tokenizer, while the core loads.
        model = await _in_thread(load_model_config, source)
        generation_config = load_generation_config(source) if args.generation_config == "auto" else {}
        phases.end_of("model's files")
        with ProgressBars(on_progress) as progress:
            launch = asyncio.ensure_future(self._reach_core(source, progress, connect_to))
            try:
                if not args.skip_tokenizer_init:
                    self._tokenizer = await _in_thread(load_tokenizer, source, args)
                client = self._client = await launch
            except BaseException:
                launch.cancel()
                await asyncio.wait([launch])
                raise
        if self._tokenizer is not None:
            self._tokenizer.limit_text(client.info.max_seq_len)
        self._inputs = InputProcessor(
            model,
            client.info.max_seq_len,
            self._tokenizer,
            generation_config,
            args.seed,
            name=uuid.uuid4().hex[:8],
            number=client.info.front_end,
        )
        if connect_to is None:
            phases.add(client.info.startup)
        phases.end_of("tokenizer, connecting")
        self.info = msgspec.structs.replace(
            client.info, default_sampling=self._inputs.default_sampling, startup=phases.seconds
        )
        for line in phases.lines("start"):
            logger.info("%s", line)
        if self.info.default_sampling:
            logger.info("Sampling defaults from the model's generation_config.json: %s", self.info.default_sampling)
        self._receiver = asyncio.ensure_future(self._receive())

    async def _reach_core(self, source: ModelSource, progress: ProgressCallback, address: str | None) -> CoreClient:
        if address is not None:
            return await CoreClient.connect(address, self._die)
        return await CoreClient.launch(self.args, source, self._core, progress, self._die)

    @property
    def tokenizer(self) -> Tokenizer:
        """encode, decode, token_bytes, render_chat. After `start()`.

        Raises:
            RequestError: there is none (skip_tokenizer_init).
        """
        if self._tokenizer is None:
            raise RequestError("There is no tokenizer: skip_tokenizer_init is set, or the engine has not been started.")
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | Mapping[str, Any] | None = None,
        cumulative: bool = True,
    ) -> RequestStream:
        """Validate a request and return the stream of its outputs; it is submitted when first read.

        May be called from any thread; the stream is read on the engine's loop.

        Args:
            prompt: text; token ids; or {"prompt_token_ids": ids, "prompt": text to echo in the outputs}.
            sampling_params: defaults are the model's generation_config.json, then greedy where nothing is asked for.
                `max_tokens` unset is what `max_seq_len` leaves; set to more than that is an error, never clamped.
            request_id: name for logs and `abort`; made up when absent; must not be in use.
            priority: 0 to 100, larger first; overrides `sampling_params.priority`.
            cache_salt: requests share cached prefixes only with requests of the same salt.
            kv_cache_retention_config: how long its blocks should stay in the prefix cache; or its fields as a dict.
            cumulative: False: outputs on the way hold only what is new, which costs a long answer less.

        Raises:
            RequestError: an empty prompt, token ids out of the vocabulary, a bad setting, a range outside the prompt.
            ContextLengthError: prompt, or prompt and max_tokens, over `max_seq_len`.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        if self._inputs is None:
            raise EngineError("The engine has not been started: await start() first.")
        if request_id is not None and request_id in self._outputs:
            raise RequestError(f"request_id {request_id!r} is in use; choose another.", param="request_id")
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = SamplingParams(**(sampling_params or {}))
        retention = kv_cache_retention_config
        if isinstance(retention, Mapping):
            retention = KvCacheRetentionConfig(**retention)
        prepared = self._inputs.prepare(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            retention=retention,
        )
        return RequestStream(self, prepared, cumulative)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """The token ids of a chat under the model's template (`tokenizer.render_chat`). Any thread may call it."""
        return self.tokenizer.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with finish_reason "cancelled". Unknown ids are ignored."""
        state = self._outputs.get(request_id)
        if state is not None:
            self._drop(state)

    @property
    def is_alive(self) -> bool:
        """Whether the engine can answer."""
        return self._client is not None and self._dead_reason is None

    @property
    def dead_reason(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self._dead_reason

    @property
    def num_requests(self) -> int:
        """Requests of this front end that have not ended."""
        return self._outputs.num_requests

    async def get_stats(self) -> dict[str, Any]:
        """The scheduler's counters and, under `front_end`, this front end's. Reading consumes nothing.

        Raises:
            EngineDeadError: the engine is gone.
        """
        values: dict[str, Any] = await self._ask(GetStats)
        mine = {"num_requests": self._outputs.num_requests, "num_finished_requests": dict(self._outputs.num_finished)}
        return {**values, "front_end": mine}

    async def trace(self, num_steps: int) -> dict[str, Any]:
        """What the device does over the next `num_steps` steps (`headrace.worker.trace.summarize`), once they are done.

        Recording slows the host. With nothing left to run the trace ends early, with the steps it has.

        Raises:
            EngineDeadError: the engine is gone.
            EngineError: a trace is running already.
        """
        values: dict[str, Any] = await self._ask(lambda call_id: Trace(call_id, num_steps))
        if "error" in values:
            raise EngineError(f"The engine did not trace: {values['error']}.")
        return values

    async def read_kv_cache_events(self, since: int = 0, limit: int = EVENTS_PER_READ) -> EventPage:
        """KV cache events from the one with id `since` on, at most `limit`. Reading consumes nothing.

        Raises:
            RequestError: `kv_cache_config.event_buffer_max_size` is 0, `since` is no event's id, a bad limit.
            EngineDeadError: the engine is gone.
        """
        answer: KvEvents = await self._ask(lambda call_id: ReadEvents(call_id, since, limit))
        if answer.page is None:
            raise RequestError(answer.error, param=answer.param)
        return answer.page

    async def get_kv_cache_events(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """The KV cache events that this object has not given yet, in TensorRT-LLM's schema.

        Other readers miss nothing by it. Events that were overwritten before they could be read are missing from the
        `event_id`s, and a warning says how many.

        Args:
            timeout: seconds to wait for one where there is none; None: do not wait.

        Raises:
            RequestError: `kv_cache_config.event_buffer_max_size` is 0.
            EngineDeadError: the engine is gone.
        """
        deadline = time.monotonic() + (timeout or 0.0)
        found: list[dict[str, Any]] = []
        async with self._reads_events:
            while True:
                page = await self.read_kv_cache_events(self._next_event)
                self._next_event = page.next
                found += [to_dict(event) for event in page.events]
                if page.lost:
                    logger.warning(
                        "%d KV cache events were overwritten before they were read; raise "
                        "kv_cache_config.event_buffer_max_size or read more often.",
                        page.lost,
                    )
                left = deadline - time.monotonic()
                if not page.events and (found or left <= 0):
                    return found
                if not page.events:
                    await asyncio.sleep(min(EVENTS_POLL_S, left))

    async def _ask(self, make: Callable[[int], GetStats | ReadEvents | Trace]) -> Any:
        """Send a question to the core and wait for its answer. make: call id -> message."""
        self._check_alive()
        assert self._client is not None
        self._num_calls += 1
        call_id = self._num_calls
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = answer
        self._client.send(make(call_id))
        try:
            return await answer
        finally:
            self._calls.pop(call_id, None)

    async def check_health(self, timeout_s: float = 10.0) -> None:
        """Return when the core's loop has answered.

        Raises:
            EngineDeadError: it is gone.
            EngineError: it did not answer in time.
        """
        try:
            await asyncio.wait_for(self.get_stats(), timeout_s)
        except asyncio.TimeoutError:
            raise EngineError(f"The engine core has not answered for {timeout_s:.0f} s.") from None

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` on the loop when the engine dies (not on an ordinary shutdown)."""
        self._death_callbacks.append(callback)

    def shutdown(self) -> None:
        """Stop the core process and fail what is pending with EngineDeadError. Repeatable; a second at most."""
        self._stopping = True
        self._die("the engine was shut down")
        if self._receiver is not None and not self._loop.is_closed():
            self._receiver.cancel()
        self._receiver = None
        if self._client is not None:
            self._client.close()

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.shutdown()

    def _check_alive(self) -> None:
        if self._dead_reason is not None:
            raise EngineDeadError(f"The engine is gone: {self._dead_reason}.")

    def _submit(self, prepared: PreparedRequest) -> RequestState:
        self._check_alive()
        assert self._client is not None
        if prepared.request_id in self._outputs:
            raise RequestError(f"request_id {prepared.request_id!r} is in use; choose another.", param="request_id")
        state = self._outputs.add(prepared, self._tokenizer)
        self._client.send(Submit(prepared.choices))
        return state

    def _drop(self, state: RequestState) -> None:
        """Abort a request; whoever still reads it gets what there is."""
        if not state.is_finished:
            abort = self._outputs.drop(state)
            state.cancel()
            if self._client is not None and self._dead_reason is None:
                self._client.send(abort)

    def _drop_threadsafe(self, state: RequestState) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop, state)

    async def _receive(self) -> None:
        """The one task that hands what the core sends to the requests it belongs to."""
        client = self._client
        assert client is not None
        try:
            while True:
                for message in await client.receive():
                    if isinstance(message, Outputs):
                        for reply in self._outputs.process(message.deltas):
                            client.send(reply)
                    elif isinstance(message, Stats | KvEvents):
                        answer = self._calls.get(message.call_id)
                        if answer is not None and not answer.done():
                            answer.set_result(message.values if isinstance(message, Stats) else message)
                    elif isinstance(message, Dying):
                        self._die(message.reason)
        except asyncio.CancelledError:
            raise
        # Nobody awaits this task: without it every request would hang, so its failure is the engine's.
        except Exception as error:
            logger.exception("The front end failed.")
            self._die(f"the front end failed: {type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        """The engine is gone: tell everyone who waits. The first reason counts."""
        if self._dead_reason is not None:
            return
        self._dead_reason = reason
        error = EngineDeadError(f"The engine is gone: {reason}.")
        self._outputs.fail_all(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        # A start that fails or is given up says so itself.
        if self._receiver is not None and not self._stopping:
            logger.error("The engine died: %s.", reason)
            for callback in self._death_callbacks:
                callback(reason)
        if self._client is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.dead.set)
