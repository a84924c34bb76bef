# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: text or token ids in, one prompt or many, `index = prompt_index * n + choice`."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.server.body import documents, parse_body, unless_disconnected
from headrace.server.context import ServerContext, context_of
from headrace.server.openai.generation import Delta, EnginePrompt, Generation, Head, check_choice, open_generation
from headrace.server.openai.logprobs import LegacyLogprobs, join_logprobs, prompt_logprobs
from headrace.server.openai.protocol.completions import Completion, CompletionChoice, CompletionRequest
from headrace.server.openai.protocol.generation import Usage
from headrace.server.openai.sampling import check_stream_options, to_sampling_params
from headrace.server.openai.streaming import EventStream, chunk_events

router = APIRouter()

OPENAI_MAX_TOKENS = 16
MAX_PROMPTS = 2048


@router.post("/v1/completions", openapi_extra=documents(CompletionRequest))
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await parse_body(request, CompletionRequest)
    head = Head.new("cmpl", context.check_model(body.model))
    check_request(body)
    context.admit(request, len(prompt_list(body)) * num_sequences(body))
    generation = await start(context, head, body)
    answer = CompletionAnswer(context, head, body, generation)
    if body.stream:
        return EventStream(chunk_events(generation, answer, body))
    completion = await unless_disconnected(request, answer.complete())
    return Response(completion.model_dump_json(), media_type="application/json")


async def start(context: ServerContext, head: Head, body: CompletionRequest) -> Generation:
    """Prompts and settings checked; nothing runs yet."""
    params = to_sampling_params(
        body,
        context.llm.info.default_sampling,
        n=num_sequences(body),
        # The engine makes at least one token; `is_scoring` drops it again.
        max_tokens=1 if is_scoring(body) else OPENAI_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs if num_sequences(body) == (body.n or 1) else body.logprobs or 0,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    return await open_generation(context.llm, head, prompt_list(body), params, body)


def check_request(body: CompletionRequest) -> None:
    """Rules between fields.

    Raises:
        RequestError: with `param` set.
    """
    check_stream_options(body)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens is 0 and echo is not set: there would be no answer.", param="max_tokens")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise RequestError(f"best_of ({body.best_of}) must be at least n ({body.n or 1}).", param="best_of")
    if body.stream and num_sequences(body) > (body.n or 1):
        raise RequestError("best_of over n cannot be streamed.", param="best_of")


def prompt_list(body: CompletionRequest) -> Sequence[EnginePrompt]:
    """The prompts, one by one.

    Raises:
        RequestError: none, or too many.
    """
    prompt = body.prompt
    prompts: Sequence[EnginePrompt]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [[token for token in prompt if isinstance(token, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
    if not prompts or any(not item for item in prompts):
        raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are taken.", param="prompt")
    return prompts


def num_sequences(body: CompletionRequest) -> int:
    """Sequences to run for each prompt."""
    return body.best_of or body.n or 1


def is_scoring(body: CompletionRequest) -> bool:
    """`echo` with `max_tokens` 0: the prompt and its log-probabilities, and no answer."""
    return bool(body.echo) and body.max_tokens == 0


def best(choices: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The `count` choices with the highest log-probability per token, best first."""
    if len(choices) == count:
        return list(choices)
    ranked = sorted(choices, key=lambda choice: -(choice.cumulative_logprob or 0.0) / max(1, choice.length))
    return ranked[:count]


class CompletionAnswer:
    """The answer to one request, as one object or as chunks."""

    def __init__(self, context: ServerContext, head: Head, body: CompletionRequest, generation: Generation) -> None:
        self._llm = context.llm
        self._head = head
        self._body = body
        self._generation = generation
        self._num_choices = body.n or 1
        self._skip_special = body.skip_special_tokens is not False
        self._builders: dict[int, LegacyLogprobs] = {}
        self._begun: set[int] = set()

    async def complete(self) -> Completion:
        try:
            outputs = await self._generation.finals()
        finally:
            self._generation.close()
        choices = [
            self._choice(prompt_index * self._num_choices + rank, output, choice)
            for prompt_index, output in enumerate(outputs)
            for rank, choice in enumerate(best(output.outputs, self._num_choices))
        ]
        return self._completion(choices, self._generation.usage(0 if is_scoring(self._body) else None))

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        body = self._body
        full = self._echo(index, output) if body.echo else CompletionChoice(index=index, text="")
        full.finish_reason = check_choice(choice) or "stop"
        full.prompt_token_ids = output.prompt_token_ids if body.return_token_ids else None
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            full.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if is_scoring(body):
            full.finish_reason = "length"
            return full
        full.text += choice.text
        full.stop_reason = choice.stop_reason
        full.token_ids = choice.token_ids if body.return_token_ids else None
        if body.logprobs is not None and choice.logprobs is not None:
            answer = self._builder(index).build(choice.token_ids, choice.logprobs)
            full.logprobs = join_logprobs(full.logprobs, answer)
        return full

    def _echo(self, index: int, output: RequestOutput) -> CompletionChoice:
        """The prompt as the beginning of a choice."""
        ids = output.prompt_token_ids
        text = output.prompt
        if text is None:
            text = self._llm.tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        echo = CompletionChoice(index=index, text=text)
        if self._body.logprobs is not None and output.prompt_logprobs is not None:
            echo.logprobs = self._builder(index).build(ids, output.prompt_logprobs)
        elif self._body.logprobs is not None:
            self._builder(index).skip_text(text)
        return echo

    def _builder(self, index: int) -> LegacyLogprobs:
        if index not in self._builders:
            self._builders[index] = LegacyLogprobs(self._llm.tokenizer, self._body.logprobs or 0, self._skip_special)
        return self._builders[index]

    def opening(self) -> Iterator[Completion]:
        """Nothing: a completion's first chunk has text."""
        return iter(())

    def render(self, delta: Delta) -> Iterator[Completion]:
        index = delta.prompt_index * self._num_choices + delta.choice_index
        body = self._body
        output = self._generation.latest[delta.prompt_index]
        if (body.echo or body.return_token_ids) and index not in self._begun and output is not None:
            self._begun.add(index)
            first = self._echo(index, output) if body.echo else CompletionChoice(index=index, text="")
            first.prompt_token_ids = output.prompt_token_ids if body.return_token_ids else None
            yield self._completion([first])
        if delta.finish_reason is not None:
            reason = "length" if is_scoring(body) else delta.finish_reason
            end = CompletionChoice(index=index, text="", finish_reason=reason, stop_reason=delta.stop_reason)
            yield self._completion([end])
        elif not is_scoring(body) and (delta.text or body.logprobs is not None or body.return_token_ids):
            piece = CompletionChoice(index=index, text=delta.text)
            if body.return_token_ids:
                piece.token_ids = delta.token_ids
            if body.logprobs is not None and delta.logprobs is not None:
                piece.logprobs = self._builder(index).build(delta.token_ids, delta.logprobs)
            yield self._completion([piece])

    def closing(self, usage: Usage) -> Completion:
        if is_scoring(self._body):
            usage = self._generation.usage(0)
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        head = self._head
        return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
