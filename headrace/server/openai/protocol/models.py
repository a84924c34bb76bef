# SPDX-License-Identifier: Apache-2.0
"""GET /v1/models, POST /tokenize and /detokenize."""

from typing import Literal

from pydantic import JsonValue

from headrace.server.openai.protocol.chat import ChatMessage
from headrace.server.openai.protocol.generation import RequestModel, ResponseModel, TokenId, Unsupported


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    max_model_len: int
    """Tokens of prompt and answer together that the server takes now (vLLM's name for `max_seq_len`)."""


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(RequestModel):
    """`prompt` or `messages`, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_special_tokens: bool | None = None
    """False leaves out what the tokenizer adds around a plain `prompt` (BOS and the like); default true."""
    chat_template: Unsupported = None
    tools: Unsupported = None


class TokenizeResponse(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(ResponseModel):
    prompt: str
