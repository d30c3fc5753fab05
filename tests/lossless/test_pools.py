"""Failures, second drafters, lookups and expensive verification change no token; models depend on the whole text."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from actors.sampling.acceptance import DrawAddress
from cluster.costs import ForwardCost
from cluster.routing.ledger import Generation
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Sampling
from tests.lossless.history import NextLogits, disturbed, drawn_by_history
from tests.lossless.parts import EOS, Schedule, Setting
from tests.lossless.pools import Pools, PoolWorld
from tests.lossless.test_distribution import FALSE_ALARM, p_value_of
from tests.lossless.world import calm, lossy_delays, near_patience
from tests.sampling_reference import accept, process

VOCABULARY = 12
NEW_TOKENS = 24
AT_ONCE = 6
WORLDS = 2
UNUSED = torch.zeros(VOCABULARY, VOCABULARY)  # these models are not tables
TARGET = drawn_by_history(VOCABULARY, seed=1, scale=2.0)
DRAFT = disturbed(TARGET, drawn_by_history(VOCABULARY, seed=2, scale=0.5))
DEAR = ForwardCost.linear(0.010, per_token_s=0.001)  # makes verification of some draft tokens too expensive
CASES = {
    "targets lost": (Pools(TARGET, DRAFT, lost_targets=2), None),
    "drafters lost": (Pools(TARGET, DRAFT, lost_drafters=3), None),
    "planned moves": (Pools(TARGET, DRAFT, planned_moves=8), None),
    "lookup first": (Pools(TARGET, DRAFT, hybrid=True), None),
    "expensive verification": (Pools(TARGET, DRAFT), DEAR),
    "all of it": (Pools(TARGET, DRAFT, lost_targets=2, lost_drafters=3, planned_moves=4, hybrid=True), DEAR),
}
FEW = 4  # vocabulary size, small enough to enumerate texts
FEW_NEW = 3
FEW_PROMPT = (1, 2, 1)
FEW_AT_ONCE = 8
FEW_WORLDS = 40  # `tests/exhaustive` has more
FEW_TARGET = drawn_by_history(FEW, seed=3, scale=1.5)
FEW_DRAFT = disturbed(FEW_TARGET, drawn_by_history(FEW, seed=4, scale=0.5))


def plainly(generation: Generation, target: NextLogits = TARGET) -> tuple[int, ...]:
    """Decodes the target's text token by token, without a scheduler."""
    tokens = list(generation.prompt)
    while len(tokens) < generation.max_len and (tokens[-1] != EOS or len(tokens) == len(generation.prompt)):
        generated = tokens[len(generation.prompt) :]
        logits = process(target(tuple(tokens)).unsqueeze(0), generation.sampling, generated)
        at = DrawAddress(generation.seed, generation.choice, len(tokens))
        tokens.append(
            accept(Acceptance.COUPLED, generation.sampling.greedy, logits, DraftTree.chain(()), at).next_token
        )
    return tuple(tokens[len(generation.prompt) :])


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param(case, schedule, id=f"{case}, {schedule.__name__}")
        for case in CASES
        for schedule in (calm, lossy_delays, near_patience)
        if case == "all of it" or schedule is lossy_delays  # single faults run only on the hardest schedule
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7)], ids=["greedy", "coupled"])
def test_no_loss_and_no_drafter_changes_a_token(sampling, case, schedule):
    setting = Setting(UNUSED, UNUSED, Acceptance.COUPLED, schedule, 4, NEW_TOKENS, sampling, ahead=4, interruption=0.1)
    pools, step_cost = CASES[case]
    seen: Counter[str] = Counter()
    for seed in range(WORLDS):
        world = PoolWorld(replace(setting, prompt=(1, 2, 3 + seed), step_cost=step_cost), pools, AT_ONCE, seed)
        assert world.run() == [plainly(session.generation) for session in world.sessions.values()]
        seen += world.counts
        seen["accepted"] += world.accepted
    assert seen["accepted"] > AT_ONCE * WORLDS / 2, "the drafters were hardly used"
    assert (seen["moved to another target"] > 0) == (pools.lost_targets > 0)
    assert (seen["moved to another drafter"] > 0) == (pools.lost_drafters > 0)
    assert (seen["moved as planned"] > 0) == (pools.planned_moves > 0)
    assert (seen["likely tokens asked for"] > 0) == (step_cost is not None)


def exact_distribution(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Returns the probability of each short continuation under non-speculative decoding at temperature 1."""
    exact: dict[tuple[int, ...], float] = {}
    ahead: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while ahead:
        text, chance = ahead.pop()
        probs = torch.softmax(FEW_TARGET((*prompt, *text)).double(), dim=-1).tolist()
        for token, p in enumerate(probs):
            is_over = token == EOS or len(text) + 1 == FEW_NEW
            if is_over:
                exact[*text, token] = chance * p
            else:
                ahead.append(((*text, token), chance * p))
    return exact


def texts_with_losses(schedule: Schedule, worlds: int) -> list[tuple[int, ...]]:
    """Returns texts of worlds with failures. Lookup drafts are point masses, and failures depend on no drawn token."""
    pools = Pools(FEW_TARGET, FEW_DRAFT, lost_targets=2, lost_drafters=2, planned_moves=2, hybrid=True)
    setting = Setting(
        torch.zeros(FEW, FEW),
        torch.zeros(FEW, FEW),
        Acceptance.REJECTION,
        schedule,
        new_tokens=FEW_NEW,
        prompt=FEW_PROMPT,
        ahead=2,
        interruption=0.1,
        step_cost=DEAR,
    )
    samples: list[tuple[int, ...]] = []
    seen: Counter[str] = Counter()
    for seed in range(worlds):
        world = PoolWorld(setting, pools, FEW_AT_ONCE, seed)
        samples += world.run()
        seen += world.counts
    assert min(seen["blocks"], seen["blocks looked up"]) > len(samples) / 10
    moves = ("moved to another target", "moved to another drafter", "moved as planned")
    assert min(seen[move] for move in moves) > len(samples) / 10
    return samples


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__)
def test_losses_lookups_and_expensive_verification_keep_the_distribution(schedule):
    samples = texts_with_losses(schedule, FEW_WORLDS)
    assert p_value_of(exact_distribution(FEW_PROMPT), samples) > FALSE_ALARM
