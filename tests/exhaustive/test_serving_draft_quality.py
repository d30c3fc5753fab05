"""Over Ray and HTTP, a drafter's proposals turn to noise, and operators see the countermeasures."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.status import recoveries_table
from tests.exhaustive.noisy_deployment import MARK
from tests.integration.serving import Reference, Served, built_by, demo_served

PROMPTS = 4  # concurrent prompts
ROUNDS = 12  # maximum rounds
ANSWER = 160  # tokens per answer


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "noisy"
    monkeypatch.setenv(MARK, str(path))
    return path


@pytest.fixture
def served(mark: Path) -> Iterator[Served]:
    drafters = ("draft.replicas={min: 2, max: 2}", "draft.resources.num_cpus=0.2")
    steps = ("speculation.schedule=lock_step", "speculation.draft_tokens=4")
    with built_by("tests.exhaustive.noisy_deployment:build"), demo_served(*drafters, *steps) as served:
        yield served


def test_a_drafter_that_turns_to_noise_is_resynchronized_and_left_out(served: Served, mark: Path) -> None:
    """No request fails, no text changes, and `slipstream status` shows every step."""
    reference = Reference(served.config.model.target)
    noisy = mark.read_text()
    answers: dict[str, str] = {}
    steps: dict[tuple[str, str], int] = {}
    for number in range(ROUNDS):
        prompts = [f"Tell me {1 + number} things about the number {7 * number + i}." for i in range(PROMPTS)]
        answers = ask_all(served, prompts)
        (router,) = served.inspect("Router")
        steps = router["remedies"]
        if (noisy, "given up") in steps:
            break
    assert {step for drafter, step in steps if drafter == noisy} >= {"resynced", "given up"}, steps
    assert not [step for drafter, step in steps if drafter != noisy], "the other drafter is as good as ever"
    for prompt, text in answers.items():
        reference.assert_greedy(prompt, ANSWER, text)
    assert noisy in list(recoveries_table([router]).columns[0].cells)


def ask_all(served: Served, prompts: Sequence[str]) -> dict[str, str]:
    """Sends all prompts concurrently; raises if a request fails."""

    def ask(prompt: str) -> str:
        answer = served.client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=ANSWER,
            temperature=0,
        )
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return dict(zip(prompts, threads.map(ask, prompts), strict=True))
