"""Tests prompts in a draft's own chat template: rendered conversations, and fallback to the target's prompt."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.config import ServerConfig
from cluster.errors import EngineError, ModelError
from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.chat_template import ChatTemplate, Rendering
from serve_app.api.draft_prompt import DraftPrompts
from tests.asgi_front import MODEL, AsgiFront, asgi_front, talking_codec
from tests.byte_tokenizer import byte_tokenizer
from tests.talking_tokenizer import talking_tokenizer

USER = {"role": "user", "content": "hi <pad>"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT = "/v1/chat/completions"


def refuse(_: Rendering) -> str:
    raise EngineError("the renderer did not answer")


@pytest_asyncio.fixture
async def front() -> AsyncIterator[AsgiFront]:
    """Serves a model whose draft has a simpler template, without tools."""
    async with asgi_front(talking_codec(), draft_prompts=DraftPrompts(ChatTemplate(byte_tokenizer()))) as front:
        yield front


async def drafted_from(front: AsgiFront, path: str = CHAT, **body: Any) -> str:
    """Returns the draft's prompt for a request."""
    front.plays([Ended(Finish.STOP)])
    answer = await front.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return str(byte_tokenizer().decode(list(front.generator.generations[-1].draft_prompt)))


async def test_a_conversation_is_rendered_in_both_templates(front: AsgiFront) -> None:
    messages = [{"role": "developer", "content": "Be short."}, USER]
    assert await drafted_from(front, messages=messages) == "system:Be short.;user:hi <pad>;assistant:"
    assert talking_tokenizer().decode(front.prompt).startswith("<|im_start|>system\nBe short.")
    (generation,) = front.generator.generations
    assert byte_tokenizer().pad_token_id not in generation.draft_prompt, "a control token's name in a message is text"


async def test_all_choices_and_the_responses_endpoint_have_the_prompt(front: AsgiFront) -> None:
    await drafted_from(front, messages=[USER], n=2)
    one, other = front.generator.generations
    assert one.draft_prompt == other.draft_prompt != ()
    assert await drafted_from(front, "/v1/responses", input="hi") == "user:hi;assistant:"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]},
        {"messages": [USER, {"role": "system", "content": "the template refuses a late system message"}]},
        {"messages": [USER], "truncate_prompt_tokens": 8},
    ],
    ids=["tools", "calls", "an error", "a truncated prompt"],
)
async def test_unsupported_conversations_are_answered_without_a_draft_prompt(
    front: AsgiFront, body: dict[str, Any]
) -> None:
    assert await drafted_from(front, **body) == ""


async def test_completions_have_no_draft_prompt(front: AsgiFront) -> None:
    assert await drafted_from(front, "/v1/completions", prompt="hi") == ""


async def test_without_the_option_there_is_no_draft_prompt() -> None:
    async with asgi_front(talking_codec()) as front:
        assert await drafted_from(front, messages=[USER]) == ""


async def test_a_failed_renderer_costs_only_the_draft_prompt() -> None:
    prompts = DraftPrompts(ChatTemplate(byte_tokenizer(), render=refuse))
    async with asgi_front(talking_codec(), draft_prompts=prompts) as front:
        assert await drafted_from(front, messages=[USER]) == ""


async def test_tools_are_rendered_by_a_template_that_takes_them() -> None:
    prompts = DraftPrompts(ChatTemplate(talking_tokenizer()))
    async with asgi_front(talking_codec(), draft_prompts=prompts) as front:
        assert "weather" in await drafted_from(front, messages=[USER], tools=[TOOL])


def test_a_draft_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "with")
    DraftPrompts.load(str(tmp_path / "with"), ServerConfig(), max_context=64)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "without")
    with pytest.raises(ModelError, match=r"has no chat template; set draft\.prompt to text"):
        DraftPrompts.load(str(tmp_path / "without"), ServerConfig(), max_context=64)
