"""A target that plans the next step before it settles the last one sends the same messages as one that does not."""

import random

import pytest

from cluster.envelope import Send
from cluster.verification.step import Row
from protos.draft_tree import DraftTree
from tests.scenarios.transcript import Tokens
from tests.scenarios.verification import VOCABULARY, Target, text

PROMPTS = {"a": (0, 1, 2, 3), "b": (10, 11), "c": tuple(range(20, 29)), "d": (30,)}
LENGTHS = {"a": 30, "b": 9, "c": 24, "d": 40}


def a_target() -> Target:
    target = Target()
    for name, prompt in PROMPTS.items():
        target.open(name, tokens=prompt, max_len=LENGTHS[name], draft_tokens=5)
        target.attach(prompt, name)
    return target


def a_draft(known: Tokens, draws: random.Random) -> DraftTree:
    """Returns a chain or a tree, right up to a random position."""
    right = text(known, 5)
    cut = draws.randrange(6)
    tokens = right[:cut] + tuple((token + 1) % VOCABULARY for token in right[cut:])
    if draws.random() < 0.5:
        return DraftTree.chain(tokens[: draws.randrange(1, 6)])
    wrong = (right[0] + 1) % VOCABULARY
    return DraftTree((wrong, *right[:3]), (-1, -1, 1, 2))


def deliver(target: Target, seed: int) -> None:
    """Delivers blocks after the outcomes of the current step, as drafted ahead of them; some are for other outcomes."""
    draws = random.Random(seed)
    for name, known in target.known.items():
        ahead = tuple(known)
        after = draws.choice((ahead, ahead, (*ahead, 7)))
        if draws.random() < 0.8 and len(after) < LENGTHS[name] - 6:
            target.block(after, a_draft(after, draws), name)


def run(seed: int, is_overlapped: bool) -> tuple[list[tuple[Row, ...]], list[Send]]:
    """Returns the rows of all steps, and all messages."""
    target = a_target()
    scheduler = target.scheduler
    sent: list[Send] = []
    plan = scheduler.plan(target.now)
    while plan is not None:
        outcomes = target.compute(plan)
        deliver(target, seed + len(target.rows))
        target.now += 0.1
        if is_overlapped:
            scheduler.commit(outcomes, 0.1, target.now)
            plan = scheduler.plan(target.now)
            sent += scheduler.settle()
        else:
            sent += scheduler.apply(outcomes, 0.1, target.now)
            plan = scheduler.plan(target.now)
    assert scheduler.is_idle
    return target.rows, sent


@pytest.mark.parametrize("seed", range(0, 2000, 100))
def test_an_overlapped_target_makes_the_same_steps_and_sends_the_same_messages(seed: int) -> None:
    rows, sent = run(seed, is_overlapped=True)
    assert (rows, sent) == run(seed, is_overlapped=False)
    assert any(row.drafted for step in rows for row in step), "no block was verified"
