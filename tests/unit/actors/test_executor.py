"""The target's step: slots, rows of mixed kinds, and which logits belong to which row."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.cache import FeedRow
from actors.executor import StepExecutor
from actors.toy import ToyRunner
from cluster.steps import Outcome, Row, StepPlan
from protos.messages import Sampling
from tests.unit.cluster.samples import an_open

VOCABULARY = 8
NEXT = {token: (token * 3 + 1) % VOCABULARY for token in range(VOCABULARY)}  # greedy: what follows what


class SpyRunner(ToyRunner):
    """Remembers what it was fed."""

    def __init__(self, slots: int) -> None:
        table = torch.zeros(VOCABULARY, VOCABULARY)
        for token, following in NEXT.items():
            table[token, following] = 1.0
        super().__init__(table, slots)
        self.fed: list[list[FeedRow]] = []

    def forward(self, rows: Sequence[FeedRow]) -> Tensor:
        self.fed.append(list(rows))
        return super().forward(rows)


def test_rows_of_mixed_kinds_and_lengths_are_decided_each_from_its_own_logits():
    """A prefill chunk, a block, a single token and a whole prompt in one forward [test_multiple_sequences]."""
    runner = SpyRunner(4)
    executor = StepExecutor(runner, runner.vocabulary)
    opens = tuple(an_open(name) for name in ("chunk", "block", "single", "prompt"))
    executor.step(StepPlan((), opens, (Row("block", (2,), 0, False), Row("single", (5,), 0, False))))
    right = (NEXT[4], NEXT[NEXT[4]])
    rows = (
        Row("chunk", (1, 2, 3), 0, decide=False),
        Row("block", (4, *right, 6), 1, decide=True, draft_len=3),
        Row("single", (6,), 1, decide=True),
        Row("prompt", (7, 3), 0, decide=True),
    )
    assert executor.step(StepPlan((), (), rows)) == [
        Outcome("block", 2, NEXT[right[1]]),
        Outcome("single", 0, NEXT[6]),
        Outcome("prompt", 0, NEXT[3]),
    ]
    assert [row.logits for row in runner.fed[-1]] == [0, 4, 1, 1]


def test_slots_are_taken_given_back_and_used_again():
    runner = SpyRunner(2)
    executor = StepExecutor(runner, runner.vocabulary)
    executor.step(StepPlan((), (an_open("a"), an_open("b")), ()))
    assert runner.free_slots == []
    executor.step(StepPlan(("a",), (an_open("c"),), (Row("b", (1,), 0, True), Row("c", (2,), 0, True))))
    slots = [row.slot for row in runner.fed[-1]]
    assert sorted(slots) == [0, 1]
    executor.step(StepPlan(("b", "c"), (), ()))
    assert sorted(runner.free_slots) == [0, 1]
    assert executor.is_idle


def test_a_session_may_be_closed_and_opened_again_in_one_step():
    executor = StepExecutor(SpyRunner(1), SpyRunner(1).vocabulary)
    executor.step(StepPlan((), (an_open("a"),), (Row("a", (1, 2), 0, True),)))
    row = Row("a", (3,), 0, True)
    assert executor.step(StepPlan(("a",), (an_open("a", attempt=2),), (row,))) == [Outcome("a", 0, NEXT[3])]


def test_a_row_beyond_what_is_cached_is_a_bug_and_says_so():
    executor = StepExecutor(SpyRunner(1), SpyRunner(1).vocabulary)
    with pytest.raises(AssertionError, match="beyond what is cached"):
        executor.step(StepPlan((), (an_open("a"),), (Row("a", (1,), 1, True),)))


def test_penalties_count_generated_tokens_only_and_forget_what_was_rolled_back():
    """Prompt tokens are free, rejected draft tokens were never generated, reopened tokens still count."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0)
    executor = StepExecutor(SpyRunner(1), SpyRunner(1).vocabulary)
    # The prompt is (2,); 7, which follows 2, and 1 were generated before the session was opened here again.
    opened = an_open("a", tokens=(2, 7, 1), prompt_len=1, sampling=sampling)
    rejected = Row("a", (2, 7, 1, 0), 0, True, draft_len=1)
    (outcome,) = executor.step(StepPlan((), (opened,), (rejected,)))
    assert outcome == Outcome("a", 0, NEXT[1])
    (outcome,) = executor.step(StepPlan((), (), (Row("a", (NEXT[1], 2), 3, True),)))
    assert outcome.next_token == 0, "the lowest id without a penalty: 7 has one, the rejected 0 has none"


def test_noise_is_addressed_by_absolute_position():
    """Reopened with one more token of prompt, or not: the same draws at the same places, others elsewhere."""
    sampling = Sampling(temperature=1.0)

    def drawn(prompt_len: int, fed: tuple[int, ...]) -> list[int]:
        executor = StepExecutor(ToyRunner(torch.zeros(VOCABULARY, VOCABULARY), 30), VOCABULARY)
        opens = tuple(
            an_open(str(seed), tokens=fed, prompt_len=prompt_len, sampling=sampling, seed=seed) for seed in range(30)
        )
        rows = tuple(Row(str(seed), fed, 0, True) for seed in range(30))
        return [outcome.next_token for outcome in executor.step(StepPlan((), opens, rows))]

    assert drawn(1, (1, 2)) == drawn(2, (1, 2)) == drawn(2, (3, 4))
    assert drawn(1, (1, 2)) != drawn(1, (1,))
