# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: request and response; a chunk of the stream is a response with less in it."""

from typing import Annotated, Literal

from pydantic import Field

from headrace.server.openai.protocol.generation import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    Prompts,
    ResponseModel,
    Unsupported,
    Usage,
    is_none,
)


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    suffix: Unsupported = None
    response_format: Unsupported = None
    prompt_embeds: Unsupported = None
    add_special_tokens: Unsupported = None


class CompletionLogprobs(ResponseModel):
    """Four arrays of equal length, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where each token starts in the choice's `text`, in characters."""


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = Field(default=None, exclude_if=is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = Field(default=None, exclude_if=is_none)


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
