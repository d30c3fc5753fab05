"""The requests of a conversation over several turns."""

from serve_app.cli.chat import Conversation


def conversation(system: str | None = None) -> Conversation:
    return Conversation(max_tokens=8, temperature=0.5, draft_tokens=3, seed=7, system=system)


def test_each_question_holds_all_that_was_said() -> None:
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


def test_a_question_without_any_answer_was_not_asked() -> None:
    talk = conversation()
    talk.add("Hello", "")
    assert talk.question("Hello").messages == [{"role": "user", "content": "Hello"}]
