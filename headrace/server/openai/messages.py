# SPDX-License-Identifier: Apache-2.0
"""From the messages of a request to token ids: what the API demands is checked here, the rest is the template's."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.chat_template import content_text
from headrace.errors import RequestError
from headrace.server.openai.generation import LONG_PROMPT
from headrace.server.openai.protocol.chat import ChatMessage

# Names that a request may not give the template by the back door; the engine has the template's own among them.
RESERVED_KWARGS = frozenset(
    {
        "self",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
# A message's own share of the work of rendering, in characters.
MESSAGE_COST = 100
NOT_FOR_TEMPLATES = {"refusal", "annotations", "audio", "function_call", "reasoning"}


async def render_messages(
    llm: AsyncLLM,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: Mapping[str, JsonValue] | None,
) -> list[int]:
    """Token ids of the conversation.

    Args:
        add_generation_prompt: None is true, unless the last message is to be continued.

    Raises:
        RequestError: messages that cannot be rendered.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message cannot both be true.", param="continue_final_message"
        )
    reserved = sorted(RESERVED_KWARGS.intersection(template_kwargs or {}))
    if reserved:
        raise RequestError(f"chat_template_kwargs may not set '{reserved[0]}'.", param="chat_template_kwargs")
    plain = [template_message(index, message) for index, message in enumerate(messages)]
    if continue_final_message and (messages[-1].role != "assistant" or not plain[-1]["content"]):
        raise RequestError(
            "continue_final_message needs a last message from the assistant with text in it.", param="messages"
        )
    generation_prompt = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def render() -> list[int]:
        return llm.render_chat(
            plain,
            None,
            add_generation_prompt=generation_prompt,
            continue_final_message=bool(continue_final_message),
            **dict(template_kwargs or {}),
        )

    size = sum(len(message["content"]) + MESSAGE_COST for message in plain)
    return await asyncio.to_thread(render) if size > LONG_PROMPT else render()


def template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """One message as a dict, its text joined and never None.

    Raises:
        RequestError: a message without content, or tool calls where none can be.
    """
    if message.tool_calls and message.role != "assistant":
        raise RequestError("Only an assistant message has tool_calls.", param=f"messages[{index}].tool_calls")
    plain = message.model_dump(exclude_none=True, exclude=NOT_FOR_TEMPLATES)
    plain["content"] = _text(index, message)
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    return plain


def _text(index: int, message: ChatMessage) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise RequestError("A message needs content.", param=f"messages[{index}].content")
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if (part.text if part.type == "text" else part.refusal) is None:
            where = f"messages[{index}].content[{number}].{part.type}"
            raise RequestError(f"A content part of type '{part.type}' needs '{part.type}'.", param=where)
    return str(content_text([part.model_dump() for part in content]))
