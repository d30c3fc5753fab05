"""Tests the experiment's runs, their order, and the summary of answers."""

import json
from collections import Counter
from pathlib import Path

import pytest

from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatQuestion, Counters, Tally, TimedAnswer
from tools.bench.experiment import (
    GENERATE,
    PLAIN,
    SPECULATIVE,
    Bench,
    BenchReport,
    Plan,
    Prompt,
    prompt_batches,
    read_prompts,
    tasks,
    write_json,
)

ARMS = (SPECULATIVE, PLAIN)
PROMPTS = tuple(Prompt(kind="chat", prompt=f"prompt {number}") for number in range(5))


class FakeEndpoint:
    """Fake endpoint that accepts four of six drafted tokens in every speculative answer."""

    def __init__(self) -> None:
        self.asked: list[ChatQuestion] = []
        self._tally = Tally()

    async def counters(self) -> Counters:
        return Counters(0, self._tally)

    async def ask(self, model: str, question: ChatQuestion) -> TimedAnswer:
        self.asked.append(question)
        drafted, accepted = (0, 0) if question.draft_tokens == 0 else (6, 4)
        self._tally += Tally(question.max_tokens, drafted, accepted, question.max_tokens - accepted, drafted // 3)
        return TimedAnswer(question.prompt, question.max_tokens, accepted, drafted - accepted, 0.1, 1.0)


def test_arms_alternate() -> None:
    order = [(task.index, task.arm) for task in tasks(Plan(PROMPTS[:2], repeats=2), ARMS)]
    once = [(0, SPECULATIVE), (0, PLAIN), (1, PLAIN), (1, SPECULATIVE)]
    assert order == [*once, (0, PLAIN), (0, SPECULATIVE), (1, SPECULATIVE), (1, PLAIN)]


def test_arms_run_batches_equally_often() -> None:
    plan = Plan(PROMPTS, concurrencies=(1, 2), repeats=3)
    counts = Counter((task.concurrency, task.arm) for task in tasks(plan, (*ARMS, GENERATE)))
    assert counts == {
        (1, SPECULATIVE): 15,
        (1, PLAIN): 15,
        (1, GENERATE): 15,
        (2, SPECULATIVE): 9,
        (2, PLAIN): 9,  # `generate` runs only at concurrency 1
    }


def test_batches_are_full_and_contain_every_prompt() -> None:
    batches = prompt_batches(PROMPTS, 3)
    assert [len(batch) for batch in batches] == [3, 3]
    assert {prompt for batch in batches for prompt in batch} == set(PROMPTS)
    assert [len(batch) for batch in prompt_batches(PROMPTS, 8)] == [8, 8]  # an interval needs two batches


async def test_the_plain_arm_has_no_drafts_and_equal_lengths() -> None:
    endpoint = FakeEndpoint()
    plan = Plan(PROMPTS, max_tokens=20)
    batches = await Bench(endpoint, "m", None).run(plan, lambda: None)  # type: ignore[arg-type]
    measured = endpoint.asked[2:]  # after one warm-up per arm
    assert len(measured) == len(batches) == 10
    assert all(question.ignore_eos and question.max_tokens == 20 for question in measured)
    assert [q.draft_tokens for q in measured] == [None, 0, 0, None, None, 0, 0, None, None, 0]
    assert {batch.tally.drafted for batch in batches if batch.arm == PLAIN} == {0}


async def test_report_and_file_contain_the_measurements(tmp_path: Path) -> None:
    plan = Plan(PROMPTS, max_tokens=20)
    batches = await Bench(FakeEndpoint(), "m", None).run(plan, lambda: None)  # type: ignore[arg-type]
    report = BenchReport.of(batches)
    speculative, plain = report.arms
    assert (speculative.arm, speculative.tally.acceptance_rate) == (SPECULATIVE, pytest.approx(4 / 6))
    assert (plain.arm, plain.tally.acceptance_rate) == (PLAIN, None)
    [against_plain] = report.speedups
    assert (against_plain.arm, against_plain.base) == (SPECULATIVE, PLAIN)
    assert (against_plain.equal, against_plain.answers) == (5, 5)
    path = tmp_path / "out.json"
    write_json(path, {"model": "m"}, plan, report, batches)
    written = json.loads(path.read_text())
    assert len(written["runs"]) == 10
    assert written["runs"][0]["answers"][0]["text"] == "prompt 0"
    assert written["report"]["kinds"]["chat"]["accepted"] == 20


def test_default_prompts_have_four_of_each_kind() -> None:
    kinds = Counter(prompt.kind for prompt in read_prompts(BENCH_PROMPTS))
    assert kinds == dict.fromkeys(("chat", "code", "mathematics", "summary", "rewriting", "lists"), 4)
