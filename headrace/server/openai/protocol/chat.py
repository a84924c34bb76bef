# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: request, response, chunk."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from headrace.server.openai.protocol.generation import (
    MAX_LOGPROBS,
    Count,
    FinishReason,
    GenerationRequest,
    Hint,
    PromptLogprob,
    RequestModel,
    ResponseModel,
    Unsupported,
    Usage,
    is_none,
)


class ContentPart(RequestModel):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Tag("~parts")],
    Discriminator(lambda value: "~parts" if isinstance(value, list) else "~text"),
]


class FunctionCall(RequestModel):
    name: str
    arguments: str | None = None
    """JSON text, as OpenAI has it."""


class ToolCall(RequestModel):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(RequestModel):
    """A message of the conversation. What clients echo back of an earlier answer is taken as it comes."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Hint = None
    audio: Unsupported = None
    function_call: Unsupported = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: JsonValue | None = None
    tool_choice: JsonValue | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonValue | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: Hint = None

    # vLLM's own.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    echo: Unsupported = None
    best_of: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    add_special_tokens: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: Unsupported = None


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes of this token alone; null for a special token that stands for no text."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(default=None, exclude_if=is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = Field(default=None, exclude_if=is_none)


class Delta(ResponseModel):
    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)


class ChunkChoice(ResponseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = Field(default=None, exclude_if=is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
