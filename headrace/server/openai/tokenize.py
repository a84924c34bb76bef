# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize: what a prompt is to the model, and back."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.server.body import documents, parse_body
from headrace.server.context import ServerContext, context_of
from headrace.server.openai.messages import render_messages
from headrace.server.openai.protocol.models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

router = APIRouter()


@router.post("/tokenize", openapi_extra=documents(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await parse_body(request, TokenizeRequest)
    if body.model is not None:
        context.check_model(body.model)
    tokens = await tokens_of(context, body)
    answer = TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=context.llm.info.max_seq_len)
    return Response(answer.model_dump_json(), media_type="application/json")


async def tokens_of(context: ServerContext, body: TokenizeRequest) -> list[int]:
    """Exactly the ids that a completion, or a chat completion, of the same input starts from."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if body.prompt is not None:
        add_special_tokens = body.add_special_tokens is not False
        return await asyncio.to_thread(context.llm.tokenizer.encode, body.prompt, add_special_tokens=add_special_tokens)
    if not body.messages:
        raise RequestError("The list of messages is empty.", param="messages")
    return await render_messages(
        context.llm,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )


@router.post("/detokenize", openapi_extra=documents(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await parse_body(request, DetokenizeRequest)
    if body.model is not None:
        context.check_model(body.model)
    size = context.llm.info.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise RequestError(f"Token id {bad} is not in the vocabulary, which goes from 0 to {size - 1}.", param="tokens")
    text = await asyncio.to_thread(
        context.llm.tokenizer.decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
    )
    return Response(DetokenizeResponse(prompt=text).model_dump_json(), media_type="application/json")
