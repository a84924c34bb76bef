# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: parse, render the template, generate, answer."""

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.outputs import CompletionOutput
from headrace.server.body import documents, parse_body, unless_disconnected
from headrace.server.context import ServerContext, context_of
from headrace.server.openai.generation import Delta as EngineDelta
from headrace.server.openai.generation import Generation, Head, check_choice, open_generation
from headrace.server.openai.logprobs import Position, chat_logprobs, prompt_logprobs
from headrace.server.openai.messages import render_messages
from headrace.server.openai.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
)
from headrace.server.openai.protocol.errors import UnsupportedParameterError
from headrace.server.openai.protocol.generation import Usage
from headrace.server.openai.sampling import check_stream_options, to_sampling_params
from headrace.server.openai.streaming import EventStream, chunk_events

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=documents(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await parse_body(request, ChatCompletionRequest)
    head = Head.new("chatcmpl", context.check_model(body.model))
    check_request(body)
    context.admit(request, body.n or 1)
    generation = await start(context, head, body)
    answer = ChatAnswer(context, head, body, generation)
    if body.stream:
        return EventStream(chunk_events(generation, answer, body))
    completion = await unless_disconnected(request, answer.complete())
    return Response(completion.model_dump_json(), media_type="application/json")


async def start(context: ServerContext, head: Head, body: ChatCompletionRequest) -> Generation:
    """Template, tokens and settings checked; nothing runs yet."""
    token_ids = await render_messages(
        context.llm,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    params = to_sampling_params(
        body,
        context.llm.info.default_sampling,
        n=body.n or 1,
        max_tokens=answer_limit(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    try:
        return await open_generation(context.llm, head, [{"prompt_token_ids": token_ids}], params, body)
    except RequestError as error:
        error.param = "messages" if error.param == "prompt" else error.param
        raise


def check_request(body: ChatCompletionRequest) -> None:
    """Rules between fields, and what is not built.

    Raises:
        RequestError: with `param` set.
    """
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if answer_limit(body) == 0:
        raise RequestError("An answer needs at least one token: raise the limit to 1 or more.", param="max_tokens")
    refuse_tools(body)
    kind = body.response_format
    if kind is not None and kind != {"type": "text"}:
        raise UnsupportedParameterError(
            '\'response_format\' other than {"type": "text"} is not supported by this server yet.',
            param="response_format",
        )
    if body.modalities not in (None, ["text"]):
        raise UnsupportedParameterError("'modalities' other than [\"text\"] are not supported.", param="modalities")
    if body.reasoning_effort not in (None, "none"):
        raise UnsupportedParameterError(
            "'reasoning_effort' is not supported by this server yet.", param="reasoning_effort"
        )
    if body.verbosity not in (None, "medium"):
        raise UnsupportedParameterError("'verbosity' is not supported by this server yet.", param="verbosity")


def refuse_tools(body: ChatCompletionRequest) -> None:
    """Tools are taken only where they ask for nothing: an empty list, or `tool_choice: "none"`, which is as if they
    were not there."""
    if body.tools is not None and not isinstance(body.tools, list):
        raise RequestError("Invalid value for 'tools': it is a list.", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        if not body.tools:
            raise RequestError("tool_choice needs a tool to choose, and 'tools' has none.", param="tool_choice")
        raise UnsupportedParameterError("Tool calls are not supported by this server yet.", param="tool_choice")
    if body.tools and body.tool_choice != "none":
        raise UnsupportedParameterError(
            "'tools' are not supported by this server yet; leave them out, or set tool_choice to \"none\".",
            param="tools",
        )


def answer_limit(body: ChatCompletionRequest) -> int | None:
    """Most tokens of the answer; None is what is left of the context.

    Raises:
        RequestError: the two fields differ.
    """
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens ({new}) and max_tokens ({old}) differ; send only the first.",
            param="max_completion_tokens",
        )
    return new if new is not None else old


class ChatAnswer:
    """The answer to one request, as one object or as chunks."""

    def __init__(self, context: ServerContext, head: Head, body: ChatCompletionRequest, generation: Generation) -> None:
        self._llm = context.llm
        self._head = head
        self._body = body
        self._generation = generation

    async def complete(self) -> ChatCompletion:
        try:
            (output,) = await self._generation.finals()
        finally:
            self._generation.close()
        head, body = self._head, self._body
        positions = output.prompt_logprobs if body.prompt_logprobs is not None else None
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(choice) for choice in output.outputs],
            usage=self._generation.usage(),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(positions) if positions is not None else None,
        )

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._logprobs(choice.logprobs, choice.token_ids),
            finish_reason=check_choice(choice) or "stop",
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else None,
        )

    def opening(self) -> Iterator[ChatCompletionChunk]:
        """The role, once for each choice, before the first token; the first one brings the prompt's ids."""
        for index in range(self._body.n or 1):
            chunk = self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            if self._body.return_token_ids and index == 0:
                chunk.prompt_token_ids = self._generation.prompt_token_ids(0)
            yield chunk

    def render(self, delta: EngineDelta) -> Iterator[ChatCompletionChunk]:
        body = self._body
        if delta.finish_reason is not None:
            choice = ChunkChoice(
                index=delta.choice_index,
                delta=Delta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
        elif delta.text or body.logprobs or body.return_token_ids:
            choice = ChunkChoice(
                index=delta.choice_index,
                delta=Delta(content=delta.text),
                logprobs=self._logprobs(delta.logprobs, delta.token_ids),
                token_ids=delta.token_ids if body.return_token_ids else None,
            )
        else:
            return  # Tokens whose text is held back: part of a character, or of what may become a stop string.
        yield self._chunk(choice)

    def closing(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk(None, usage)

    def _chunk(self, choice: ChunkChoice | None, usage: Usage | None = None) -> ChatCompletionChunk:
        head = self._head
        return ChatCompletionChunk(
            id=head.id, created=head.created, model=head.model, choices=[choice] if choice else [], usage=usage
        )

    def _logprobs(self, positions: list[Position] | None, token_ids: list[int]) -> ChoiceLogprobs | None:
        if not self._body.logprobs or positions is None:
            return None
        skip_special = self._body.skip_special_tokens is not False
        return chat_logprobs(self._llm.tokenizer, positions, token_ids, self._body.top_logprobs or 0, skip_special)
