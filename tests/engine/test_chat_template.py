# SPDX-License-Identifier: Apache-2.0
"""Templates render as Transformers renders them, and fail as the client's mistake."""

import json
from typing import Any

import pytest

from headrace.engine.chat_template import ChatTemplate
from headrace.errors import RequestError

SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def render(source: str, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, tools, **kwargs
    )


USER = [{"role": "user", "content": "hi"}]


def test_the_functions_that_templates_call_are_there() -> None:
    assert render("{{ bos_token }}{{ {'a': 'é<'} | tojson }}", USER) == '<s>{"a": "é<"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}", USER) == '{\n  "a": 1\n}'
    assert len(render("{{ strftime_now('%Y') }}", USER)) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER) == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}", USER) == "hi"
    assert render("  {% if true %}\nx\n  {% endif %}\n", USER) == "x\n", "blocks take their own line with them"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% if %}", "Expected an expression"),
        ("{{ nothing.there }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurs"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_fails_is_a_request_error_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        render(source, USER)
    assert caught.value.param == "messages"


def test_messages_are_brought_to_the_form_that_templates_know() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}"
        "{% endfor %}"
    )
    assert render(source, chat) == "system:a\nb;assistant:;a=1"
    assert render("{% if messages[0].role == 'developer' %}known{% endif %}", chat) == "known"
    assert chat[0]["role"] == "developer" and isinstance(call["function"]["arguments"], str), (
        "the caller's are untouched"
    )
    for arguments, shown in (("not json", '"not json"'), ("", "{}"), ("[1]", '"[1]"')):
        one = [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]
        assert json.loads(render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", one)) == json.loads(
            shown
        )


def test_parts_that_are_not_text_are_refused() -> None:
    with pytest.raises(RequestError, match="image_url"):
        render(SIMPLE, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_last_message_can_be_continued() -> None:
    chat = [*USER, {"role": "assistant", "content": "The answer is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(SIMPLE, chat, **options) == "<user>hi</><assistant>The answer is "
    trimmed = SIMPLE.replace("m.content", "m.content | trim")
    assert render(trimmed, chat, **options) == "<user>hi</><assistant>The answer is"
    assert render(SIMPLE, chat, add_generation_prompt=False).endswith("is </>")
    with pytest.raises(RequestError, match="exclude each other"):
        render(SIMPLE, chat, continue_final_message=True)
    with pytest.raises(RequestError, match="last message"):
        render("nothing", chat, **options)


@pytest.mark.parametrize("name", ["chat_template", "continue_final_message", "messages"])
def test_a_request_cannot_replace_what_is_not_its_own(name: str) -> None:
    template = ChatTemplate({"default": SIMPLE}, {})
    with pytest.raises((RequestError, TypeError)):
        template.render(USER, None, **{name: "x"})


def test_tools_choose_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {})
    assert (template.render(USER), template.render(USER, [{"a": 1}]), template.render(USER, [])) == (
        "plain",
        "1 tools",
        "plain",
    )
    assert template.source == "plain"
