"""Tests responses to failing and multiple chat templates, at each endpoint that uses templates."""

from typing import Any

import pytest

from cluster.errors import EngineError, ModelError, RequestError
from serve_app.api.chat_template import ChatTemplate, Rendering, TemplateOptions
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, asgi_front
from tests.talking_tokenizer import talking_tokenizer

USER = {"role": "user", "content": "hi"}
BROKEN = {
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 10.0 ** 400 }}": "OverflowError",
    "{{ range(10 ** 9) | list }}": "OverflowError: Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ messages[7].content }}": "",
    "{{ raise_exception('Roles must alternate.') }}": "Roles must alternate.",
    "{% if %}": "Expected an expression",
}
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/tokenize", {"messages": [USER]}),
]


def with_template(template: Any, **options: Any) -> TextCodec:
    tokenizer = talking_tokenizer()
    tokenizer.chat_template = template
    return TextCodec(tokenizer, (tokenizer.eos_token_id,), **options)


@pytest.mark.parametrize(("template", "says"), BROKEN.items())
async def test_template_errors_are_answered_with_400(template: str, says: str) -> None:
    async with asgi_front(with_template(template)) as front:
        for path, body in ENDPOINTS:
            answer = await front.http.post(path, json={"model": MODEL, **body})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
            assert says in error["message"]
        assert front.generator.generations == []


async def test_a_rendered_text_beyond_the_context_is_refused() -> None:
    async with asgi_front(with_template("{{ messages[0].content * 100000 }}", max_context=64)) as front:
        for path, body in ENDPOINTS:
            answer = await front.http.post(path, json={"model": MODEL, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
            assert "200000 characters" in answer.json()["error"]["message"]


async def test_a_failing_renderer_is_a_server_error() -> None:
    def absent(rendering: Rendering) -> str:
        raise EngineError("it did not answer")

    async with asgi_front(with_template("{{ messages }}", render=absent)) as front:
        for path, body in ENDPOINTS:
            assert (await front.http.post(path, json={"model": MODEL, **body})).status_code == 500


def test_a_single_named_template_is_used() -> None:
    codec = with_template({"tool_use": "{{ messages[0].content }} {{ tools }}"})
    assert codec.template.takes("tools")
    assert codec.template.takes("tools", with_tools=True)
    assert codec.template.written([USER], TemplateOptions()) == "hi None"


def test_the_default_template_is_used_except_with_tools() -> None:
    codec = with_template({"default": "plain", "tool_use": "{{ tools[0].type }}", "rag": "{{ documents }}"})
    assert not codec.template.takes("tools")
    assert codec.template.takes("tools", with_tools=True)
    assert codec.template.written([USER], TemplateOptions()) == "plain"
    assert codec.template.written([USER], TemplateOptions(tools=[{"type": "function"}])) == "function"


def test_several_templates_without_a_default_are_refused_at_load() -> None:
    with pytest.raises(ModelError, match=r"several chat templates \(rag, tool_use\) and none is named 'default'"):
        with_template({"tool_use": "{{ tools }}", "rag": "{{ documents }}"})


def test_without_a_template_conversations_are_refused() -> None:
    for absent in (None, {}):
        with pytest.raises(RequestError, match="no chat template"):
            with_template(absent).encode_chat([USER])


def test_tokens_equal_those_of_transformers() -> None:
    tokenizer = talking_tokenizer()
    conversation = [
        {"role": "system", "content": "Be <|im_end|> short.", "name": None},
        USER,
        {"role": "assistant", "content": "Once <|im_start|>"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for special in (False, True):
        template = ChatTemplate(tokenizer, special_tokens_in_text=special)
        for continues in (False, True):
            for offered in ([], tools):
                options = TemplateOptions(offered, {"enable_thinking": True}, not continues, continues)
                expected = tokenizer.apply_chat_template(
                    conversation,
                    tools=offered or None,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    sanitize_control_tokens=not special,
                    return_dict=False,
                    enable_thinking=True,
                )
                assert template.encode(conversation, options) == tuple(expected)
