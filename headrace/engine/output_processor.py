# SPDX-License-Identifier: Apache-2.0
"""From what the core gives to what a user gets: text, stop strings, log-probabilities, n choices together.

A request's state takes deltas in; outputs are built when somebody takes them, so that a slow reader costs nothing and
gets everything since its last look.
"""

import asyncio
from collections.abc import Iterable
from typing import cast

from headrace.core.output import RequestDelta, TokenLogprobs
from headrace.engine.detokenizer import Detokenizer, StopMatcher
from headrace.engine.input_processor import PreparedRequest
from headrace.engine.ipc import Abort, Finish
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineError, HeadraceError
from headrace.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput


class ChoiceState:
    """One choice of a request as it grows."""

    def __init__(self, prepared: PreparedRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = prepared.params
        self.core_id = prepared.choices[index].request_id
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings) if params.stop_strings else None
        self._stop_reason: int | str | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._num_decoded = 0
        """Tokens whose text is in `_text`; lags behind until somebody looks, where there are no stop strings."""
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative: float | None = None if params.logprobs is None else 0.0
        self._num_given_letters = 0
        self._num_given_tokens = 0

    def feed(self, delta: RequestDelta) -> bool:
        """Take a delta in. True where a stop string ended the choice, which the core does not know yet."""
        first = len(self._token_ids)
        self._token_ids += delta.new_token_ids
        if self._logprobs is not None and delta.logprobs is not None:
            self._take_logprobs(delta.logprobs)
        if self._matcher is not None:
            shown = delta.new_token_ids[:-1] if self._hides_last(delta) else delta.new_token_ids
            for count, token_id in enumerate(shown, first + 1):
                if self._match(self._decode([token_id]), count):
                    return delta.finish_reason is None
            self._num_decoded = len(self._token_ids)
        if delta.finish_reason is not None:
            self._end(delta)
        return False

    def cancel(self) -> None:
        """End the choice as it stands."""
        if self.finish_reason is None:
            self._decode_pending(len(self._token_ids))
            self._finish("cancelled")

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def take(self, whole: bool = True) -> CompletionOutput:
        """What is new since the last call and, with `whole`, the choice so far (a copy: as long as the answer)."""
        if self.finish_reason is None:
            self._decode_pending(len(self._token_ids))
        held = 0 if self._matcher is None or self.finish_reason is not None else self._matcher.num_held
        num_letters = max(self._num_given_letters, len(self._text) - held)
        old_tokens, old_letters = self._num_given_tokens, self._num_given_letters
        self._num_given_tokens, self._num_given_letters = len(self._token_ids), num_letters
        return CompletionOutput(
            index=self._index,
            text=self._text[:num_letters] if whole else "",
            token_ids=self._token_ids.copy() if whole else [],
            cumulative_logprob=self._cumulative,
            logprobs=self._logprobs.copy() if whole and self._logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            text_diff=self._text[old_letters:num_letters],
            token_ids_diff=self._token_ids[old_tokens:],
            logprobs_diff=None if self._logprobs is None else self._logprobs[old_tokens:],
        )

    def _hides_last(self, delta: RequestDelta) -> bool:
        """Whether the last token ended the choice: it counts, and its text is not part of the answer."""
        return delta.finish_reason == "stop" and not self._includes_stop

    def _end(self, delta: RequestDelta) -> None:
        self._stop_reason = delta.stop_reason
        self._decode_pending(len(self._token_ids) - self._hides_last(delta))
        self._finish(cast(FinishReason, delta.finish_reason))

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()

    def _decode_pending(self, end: int) -> None:
        if self._num_decoded < end:
            self._text += self._decode(self._token_ids[self._num_decoded : end])
            self._num_decoded = end

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push(token_ids)

    def _match(self, text: str, num_tokens: int) -> bool:
        """Add a token's text; where it completes a stop string, end the choice with that token."""
        assert self._matcher is not None
        found = self._matcher.feed(text, is_armed=num_tokens > self._min_tokens)
        if found is None:
            self._text += text
            return False
        length, stop = found
        self._text += text[:length]
        if not self._includes_stop:
            self._text = self._text[: -len(stop)]
        del self._token_ids[num_tokens:]
        if self._logprobs is not None:
            del self._logprobs[num_tokens:]
            self._cumulative = sum(next(iter(entry.values())).logprob for entry in self._logprobs)
        self._stop_reason = stop
        self.finish_reason = "stop"
        return True

    def _take_logprobs(self, positions: Iterable[TokenLogprobs]) -> None:
        assert self._logprobs is not None and self._cumulative is not None
        for position in positions:
            self._logprobs.append(readable(position, self._tokenizer))
            self._cumulative += position.logprobs[0]


class RequestState:
    """A request that has been sent: its choices, and whoever waits for them."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.prepared = prepared
        self.choices = [ChoiceState(prepared, index, tokenizer) for index in range(prepared.params.n)]
        self.error: HeadraceError | None = None
        self.is_finished = False
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if prepared.params.prompt_logprobs is None else [None]
        )
        self._num_cached_tokens = 0
        self._is_news = False
        self._news = asyncio.Event()
        self._end = asyncio.Event()

    @property
    def is_read(self) -> bool:
        """Whether the end has been taken."""
        return self.is_finished and not self._is_news

    async def wait(self) -> None:
        """Until there is something to take, or the end."""
        await self._news.wait()

    async def wait_end(self) -> None:
        """Until the end."""
        await self._end.wait()

    def take(self, cumulative: bool = True) -> RequestOutput | None:
        """What is new, and the answers so far: at the end, and on the way if `cumulative`. None where nothing is new.

        Raises:
            HeadraceError: the request failed.
        """
        self._news.clear()
        if self.error is not None:
            self._is_news = False
            raise self.error
        if not self._is_news:
            return None
        self._is_news = False
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_token_ids,
            outputs=[choice.take(cumulative or self.is_finished) for choice in self.choices],
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
        )

    def feed(self, choice: ChoiceState, delta: RequestDelta) -> bool:
        """Take a delta of one choice in. True where a stop string ended the choice."""
        if delta.prompt_logprobs and self._prompt_logprobs is not None and choice is self.choices[0]:
            self._prompt_logprobs += [readable(position, self._tokenizer) for position in delta.prompt_logprobs]
        if choice is self.choices[0]:
            self._num_cached_tokens = delta.num_cached_tokens
        ended_by_text = choice.feed(delta)
        if choice.finish_reason is not None and all(c.finish_reason is not None for c in self.choices):
            self.is_finished = True
        self._wake()
        return ended_by_text

    def cancel(self) -> None:
        """End every choice as it stands."""
        for choice in self.choices:
            choice.cancel()
        self.is_finished = True
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """End with an error, which whoever reads next gets."""
        if not self.is_finished:
            self.error = error
            self.is_finished = True
            self._wake()

    def _wake(self) -> None:
        self._is_news = True
        self._news.set()
        if self.is_finished:
            self._end.set()


class OutputProcessor:
    """Every request that this front end has with the core."""

    def __init__(self) -> None:
        self.num_finished: dict[str, int] = {}
        """Requests ended, by the finish reason of their first choice."""
        self._by_core_id: dict[str, tuple[RequestState, ChoiceState]] = {}
        self._by_id: dict[str, RequestState] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    def add(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> RequestState:
        """Take a request in; what the core gives for it goes to the state returned."""
        state = RequestState(prepared, tokenizer)
        self._by_id[prepared.request_id] = state
        for choice in state.choices:
            self._by_core_id[choice.core_id] = (state, choice)
        return state

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request that has not ended."""
        return self._by_id.get(request_id)

    def process(self, deltas: Iterable[RequestDelta]) -> list[Finish | Abort]:
        """Give deltas to their requests. Returns what the core must be told of them."""
        replies: list[Finish | Abort] = []
        for delta in deltas:
            # The core may be steps ahead of a stop string or an abort.
            entry = self._by_core_id.get(delta.request_id)
            if entry is None:
                continue
            state, choice = entry
            if delta.finish_reason == "error":
                replies.append(self.drop(state))
                state.fail(EngineError(delta.error or "the request failed in the engine"))
                continue
            if state.feed(choice, delta):
                replies.append(Finish(choice.core_id, choice.num_tokens))
            if choice.finish_reason is not None:
                del self._by_core_id[choice.core_id]
            if state.is_finished:
                self._count(state, choice.finish_reason)
        return replies

    def drop(self, state: RequestState) -> Abort:
        """Forget a request. Returns what tells the core."""
        running = [choice.core_id for choice in state.choices if self._by_core_id.pop(choice.core_id, None)]
        if self._by_id.get(state.prepared.request_id) is state:
            self._count(state, "cancelled")
        return Abort(running)

    def fail_all(self, error: HeadraceError) -> None:
        """End every request with an error."""
        states = list(self._by_id.values())
        self._by_id.clear()
        self._by_core_id.clear()
        for state in states:
            state.fail(error)

    def _count(self, state: RequestState, reason: str | None) -> None:
        self._by_id.pop(state.prepared.request_id, None)
        name = reason or "error"
        self.num_finished[name] = self.num_finished.get(name, 0) + 1


def readable(position: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id -> log-probability at one position, the token itself first, each decoded on its own."""
    entries: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True):
        if token_id not in entries:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            entries[token_id] = Logprob(logprob, rank, text)
    return entries
