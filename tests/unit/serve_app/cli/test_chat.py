"""Tests the requests of a multi-turn conversation."""

from serve_app.cli.chat import Conversation


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
