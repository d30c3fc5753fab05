"""Lock step as a deployment serves it, with real models, beside one that paces by measured costs.

Not part of the default suite, which compares the two over toy models: `make test-exhaustive`.
"""

from collections.abc import Iterator

import pytest
from openai.types.chat import ChatCompletion

from tests.integration.serving import Served, demo_served, demo_served_beside
from tests.integration.test_serving import PROMPTS, assert_nothing_left, complete, predictions


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with demo_served("target.resources_per_rank.num_cpus=0.3", "speculation.draft_tokens=4") as served:
        yield served
        assert_nothing_left(served)


def test_lock_step_answers_as_the_adaptive_loop_does(served: Served) -> None:
    """The slow loop is the specification of the fast one: draft, verify, commit."""

    def answers(one: Served) -> list[ChatCompletion]:
        greedy = [complete(one, prompt, 20) for prompt in PROMPTS[:2]]
        return greedy + [complete(one, prompt, 20, temperature=0.8, seed=77) for prompt in PROMPTS[:2]]

    def texts(found: list[ChatCompletion]) -> list[str | None]:
        return [answer.choices[0].message.content for answer in found]

    expected = texts(answers(served))
    with demo_served_beside(
        served, "lock_step", "speculation.schedule=lock_step", "speculation.draft_tokens=4"
    ) as slow:
        found = answers(slow)
        assert texts(found) == expected
        assert all(predictions(answer)[0] > 0 for answer in found), "lock step drafts for every round"
        (drafter,) = slow.inspect("Drafter")
        assert_nothing_left(slow)
    assert drafter["counts"]["blocks"] > 0
    assert "guesses" not in drafter["counts"], "lock step drafts nothing ahead"
    assert sum(one["counts"].get("guesses", 0) for one in served.inspect("Drafter")) > 0, "the other loop does"
