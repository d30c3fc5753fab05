"""Tests the requests of a multi-turn conversation, and its errors."""

import typer

from serve_app.cli.chat import OPTIONS, Conversation, chat, with_option
from serve_app.endpoint_client import EndpointError


def conversation(system: str | None = None) -> Conversation:
    return Conversation(max_tokens=8, temperature=0.5, draft_tokens=3, seed=7, system=system)


def test_each_question_contains_the_conversation_so_far() -> None:
    talk = conversation("Be brief.")
    talk.add("Hello", "Hi")
    question = talk.question("Why?")
    assert question.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
    ]
    assert (question.max_tokens, question.temperature, question.draft_tokens, question.seed) == (8, 0.5, 3, 7)


def test_an_unanswered_question_is_dropped() -> None:
    talk = conversation()
    talk.add("Hello", "")
    assert talk.question("Hello").messages == [{"role": "user", "content": "Hello"}]


def test_a_refusal_names_the_option_of_the_field() -> None:
    limited = EndpointError("max_tokens is 512, expected at most 100, the limit of this key", "max_tokens")
    assert with_option(limited) == f"{limited}; set --max-tokens"
    assert with_option(EndpointError("no such model", "model")) == "no such model"
    assert with_option(EndpointError("no answer")) == "no answer"


def test_every_named_option_exists() -> None:
    app = typer.Typer()
    app.command()(chat)
    options = {name for option in typer.main.get_command(app).params for name in option.opts}
    assert set(OPTIONS.values()) <= options
