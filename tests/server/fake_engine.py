# SPDX-License-Identifier: Apache-2.0
"""An engine with `AsyncLLM`'s surface and no model: bytes are tokens, answers are what the test says.

For what a real model cannot be made to do on demand: fail in the middle, hang, be slow, die, say a given text.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headrace.core.kv_events import EventLog, EventPage
from headrace.errors import ContextLengthError, EngineDeadError, RequestError
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 300
MAX_SEQ_LEN = 256


class FakeTokenizer:
    chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i))).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<|end|>" if token_id == EOS else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


@dataclass
class Answer:
    """What the engine does for one choice."""

    text: str = "An answer."
    tokens_per_step: int = 1
    seconds_per_step: float = 0.0
    fail_after: int | None = None
    """Tokens after which the choice ends with an error."""
    hang_after: int | None = None
    stop_reason: int | str | None = None


@dataclass
class Call:
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int | None
    cache_salt: str | None
    retention: Any
    is_submitted: bool = False
    is_closed: bool = False
    is_finished: bool = False


class FakeStream:
    def __init__(self, llm: "FakeLLM", call: Call, prompt: str | None) -> None:
        self._llm = llm
        self.call = call
        self._prompt = prompt
        self._steps = self._run()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.call.prompt_ids

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self.call.is_closed:
            raise StopAsyncIteration
        self.call.is_submitted = True
        return await self._llm.or_death(anext(self._steps))

    async def final(self) -> RequestOutput:
        return [output async for output in self][-1]

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self.call.is_closed = True

    def _text_of(self, data: bytes) -> str:
        return data.decode("utf-8", "ignore")

    async def _run(self) -> Any:
        params = self.call.params
        answers = [self._llm.answer(self._llm.tokenizer.decode(self.call.prompt_ids), i) for i in range(params.n)]
        choices = [CompletionOutput(index=i) for i in range(params.n)]
        output = RequestOutput(
            request_id=self.call.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.call.prompt_ids,
            outputs=choices,
            num_cached_tokens=self._llm.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
        )
        while not output.finished:
            seconds = max(answer.seconds_per_step for answer in answers)
            await asyncio.sleep(seconds)
            for answer, choice in zip(answers, choices, strict=True):
                self._step(answer, choice)
                if answer.hang_after is not None and len(choice.token_ids) >= answer.hang_after:
                    yield output
                    await asyncio.Event().wait()
            output.finished = all(choice.finish_reason for choice in choices)
            self.call.is_finished = output.finished
            yield output

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.call.params.prompt_logprobs is None:
            return None
        return [None, *(self._llm.position(i, self.call.params.prompt_logprobs) for i in self.call.prompt_ids[1:])]

    def _step(self, answer: Answer, choice: CompletionOutput) -> None:
        params = self.call.params
        choice.text_diff, choice.token_ids_diff, choice.logprobs_diff = "", [], None
        if choice.finish_reason is not None:
            return
        ids = [*answer.text.encode(), EOS][: params.max_tokens or MAX_SEQ_LEN - len(self.call.prompt_ids)]
        done = len(choice.token_ids)
        new = ids[done : done + answer.tokens_per_step]
        choice.token_ids = ids[: done + len(new)]
        choice.token_ids_diff = new
        full = self._text_of(bytes(i for i in choice.token_ids if i < 256))
        choice.text_diff = full[len(choice.text) :]
        choice.text = full
        if params.logprobs is not None:
            choice.logprobs_diff = [self._llm.position(i, params.logprobs) for i in new]
            choice.logprobs = [*(choice.logprobs or []), *choice.logprobs_diff]
            choice.cumulative_logprob = sum(p[i].logprob for p, i in zip(choice.logprobs, ids, strict=False))
        if answer.fail_after is not None and len(choice.token_ids) >= answer.fail_after:
            choice.finish_reason, choice.error = "error", "a NaN in this row"
        elif len(choice.token_ids) == len(ids):
            choice.finish_reason = "stop" if ids[-1] == EOS else "length"
            choice.stop_reason = answer.stop_reason


@dataclass
class FakeLLM:
    answer: Callable[[str, int], Answer] = field(default=lambda prompt, choice: Answer())
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.info = SimpleNamespace(
            model_name="fake", max_seq_len=MAX_SEQ_LEN, vocab_size=VOCAB_SIZE, max_batch_size=4, default_sampling={}
        )
        self.calls: list[Call] = []
        self.events = EventLog(4, 512)
        self.rendered: list[dict[str, Any]] = []
        self.render_options: dict[str, Any] = {}
        self.dead_reason: str | None = None
        self._death: list[asyncio.Future[None]] = []

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None

    @property
    def running(self) -> list[Call]:
        """Requests that hold a place in the engine now."""
        return [c for c in self.calls if c.is_submitted and not c.is_closed and not c.is_finished]

    def die(self, reason: str) -> None:
        """On the server's loop."""
        self.dead_reason = reason
        for death in self._death:
            if not death.done():
                death.set_exception(EngineDeadError(reason))

    async def or_death(self, step: Any) -> RequestOutput:
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._death.append(death)
        work = asyncio.ensure_future(step)
        await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        self._death.remove(death)
        if death.done():
            work.cancel()
            death.result()
        death.cancel()
        return work.result()

    def position(self, token_id: int, count: int) -> dict[int, Logprob]:
        """The chosen token has rank 2 where there is room for alternatives, so that rank and order matter."""
        found = {token_id: Logprob(-1.5, 2, self.tokenizer.decode([token_id]) or "<|end|>")}
        for rank, other in enumerate(i for i in range(65, 65 + count + 1) if i != token_id):
            if len(found) > count:
                break
            place = rank + 1 if rank == 0 else rank + 2
            found[other] = Logprob(float("-inf") if rank > 3 else -1.0 - 0.7 * rank, place, chr(other))
        return found

    def render_chat(self, messages: Sequence[Any], tools: Any = None, **options: Any) -> list[int]:
        assert tools is None
        self.rendered, self.render_options = list(messages), options
        if any("RAISE" in m["content"] for m in messages):
            raise RequestError("The chat template cannot render these messages: no RAISE please.", param="messages")
        return self.tokenizer.encode("".join(f"[{m['role']}]{m['content']}" for m in messages))

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        kv_cache_retention_config: Any = None,
        cumulative: bool = True,
    ) -> FakeStream:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        text = prompt if isinstance(prompt, str) else None
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        ids = self.tokenizer.encode(text) if text is not None else list(ids)
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt")
        for token_id in [*ids, *(sampling_params.logit_bias or {}), *(sampling_params.stop_token_ids or [])]:
            if not 0 <= token_id < VOCAB_SIZE:
                raise RequestError(f"Token id {token_id} is not in the vocabulary.", param="prompt_token_ids")
        wanted = sampling_params.max_tokens or 1
        if len(ids) + wanted > MAX_SEQ_LEN:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens and {wanted} are asked for; max_seq_len is {MAX_SEQ_LEN}.",
                param="prompt",
            )
        call = Call(ids, sampling_params, request_id or "", priority, cache_salt, kv_cache_retention_config)
        self.calls.append(call)
        return FakeStream(self, call, text)

    async def read_kv_cache_events(self, since: int, limit: int) -> EventPage:
        return self.events.read(since, limit)

    async def get_stats(self) -> dict[str, Any]:
        return {"num_running": len(self.running)}
