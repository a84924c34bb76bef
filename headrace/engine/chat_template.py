# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a model's Jinja program turns messages into the text it was trained on.

Templates come with a checkpoint, so they run in Jinja's immutable sandbox, with the functions and extensions that
Transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import RequestError

Message = Mapping[str, Any]
OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
"""What a caller's template variables may not replace."""


class ChatTemplate:
    """One model's template, compiled once.

    Some models have several: `default`, and `tool_use` for requests with tools.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: name -> template.
            special_tokens: bos_token, eos_token, ...: variables of the template.
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def source(self) -> str:
        """The template used without tools."""
        return self.sources[self._name(None)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a chat.

        Args:
            messages: as OpenAI's API has them. Text parts are joined; `developer` is `system` to a template that
                does not know it; a tool call's arguments are given parsed.
            continue_final_message: end inside the last message, so that the model goes on with it.
            variables: further variables of the template, such as enable_thinking.

        Raises:
            RequestError: the template refuses the messages or fails, or a variable has a reserved name.
        """
        self._check(messages, add_generation_prompt and continue_final_message, variables)
        name = self._name(tools)
        plain = [_plain(message, "developer" in self.sources[name]) for message in messages]
        final = plain[-1]["content"] if continue_final_message else ""
        try:
            text = self._template(name).render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": plain,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RecursionError:
            raise RequestError("The chat template recursed without end on these messages.", param="messages") from None
        # A template is a program: it can fail in any way a program can, and none is the server's fault.
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise RequestError(f"The chat template refused these messages: {reason}", param="messages") from None
        return _cut_after(text, final) if continue_final_message else text

    def _check(self, messages: Sequence[Message], both: bool, variables: Mapping[str, Any]) -> None:
        if not messages:
            raise RequestError("messages is empty; give at least one message.", param="messages")
        if both:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other; set one of them.",
                param="continue_final_message",
            )
        taken = OWN_NAMES & variables.keys()
        if taken:
            raise RequestError(f"{min(taken)!r} is not a template variable that a request may set.", param=min(taken))

    def _name(self, tools: Sequence[Any] | None) -> str:
        wanted = "tool_use" if tools and "tool_use" in self.sources else "default"
        return wanted if wanted in self.sources else next(iter(self.sources))

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = ENVIRONMENT.from_string(self.sources[name])
        return self._compiled[name]


def _plain(message: Message, knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: text content, known role, parsed arguments."""
    plain = dict(message)
    plain["content"] = content_text(plain.get("content"))
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_parsed_call(call) for call in plain["tool_calls"]]
    return plain


def content_text(content: Any) -> Any:
    """The content of a message with its text parts joined; other kinds of parts are a RequestError."""
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"This model takes text only; a message has a part of type {kind!r}.", param="messages")
        texts.append(str(part.get("refusal" if part["type"] == "refusal" else "text") or ""))
    return "\n".join(texts)


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are a mapping where the client's JSON string holds one, else left as they are."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _cut_after(text: str, final: str) -> str:
    """The text up to the end of its last message, without what the template writes after it."""
    start = text.rfind(final.strip()) if isinstance(final, str) else -1
    if start < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message as it stands.",
            param="continue_final_message",
        )
    # Templates trim messages or do not; the model continues what the client wrote.
    exact = text.rfind(final)
    return text[: exact + len(final)] if exact >= 0 else text[: start + len(final.strip())]


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class says set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _environment()
