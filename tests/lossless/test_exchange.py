"""An exchange of weights between any two passes of running sessions changes no text.

Under rejection sampling, chi-square tests cover all continuations, each with a false-alarm rate of 1e-5. Otherwise,
texts equal those of non-speculative decoding.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from protos.draft_tree import SparseProbs
from protos.messages import Acceptance, Block, Sampling
from tests.lossless import test_distribution as small
from tests.lossless import test_trees as trees
from tests.lossless.parts import Schedule, Setting, a_draft_model
from tests.lossless.world import World, calm, lossy_delays, near_patience

SWAPS = 0.5  # probability of an exchange before a pass, or while the drafter is idle
LEAST_SWAPS = 2
VERSIONS = [small.DRAFTERS[name] for name in ("good", "adversarial", "bad")]
VARIANTS = {
    "chains": {},
    "ahead for few": {"ahead": 3},
    "interrupted": {"interruption": 0.3},
    "two a forward": {"width": 2},
    "recurrent": {"recurrent": 3},
    "coarse": {"weight_scale": 3},
}


class ExchangingWorld(World):
    """World that exchanges the draft's weights at random between passes."""

    def __init__(self, setting: Setting, sessions: int, seed: int, versions: list[Tensor]) -> None:
        super().__init__(setting, sessions, seed)
        self.swaps = 0
        self.swaps_with_sessions = 0
        self._swapping = random.Random(seed + 2)
        self._versions = [
            a_draft_model(replace(setting, draft_logits=logits), sessions, clock=lambda: 0.0)._weights
            for logits in versions
        ]

    def _draft(self, address: str) -> None:
        drafter = self.drafters[address]
        if not drafter.is_busy and self._swapping.random() < SWAPS:
            drafter.model.exchange(self._swapping.choice(self._versions))
            self.swaps += 1
            self.swaps_with_sessions += not drafter.scheduler.is_idle
            drafter.scheduler.exchanged(self.swaps, None)
        super()._draft(address)


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [("chains", calm), ("chains", near_patience), *[(variant, lossy_delays) for variant in VARIANTS]],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_under_rejection_sampling_the_distribution_is_the_targets(variant: str, schedule: Schedule) -> None:
    setting = Setting(small.TARGET, VERSIONS[0], Acceptance.REJECTION, schedule, **VARIANTS[variant])
    world = ExchangingWorld(setting, small.SESSIONS, 11, VERSIONS)
    assert small.p_value(setting, world.run()) > small.FALSE_ALARM
    assert world.swaps_with_sessions > LEAST_SWAPS
    assert sum(session.counts.drafted for session in world.sessions.values()) > small.SESSIONS / 5


def test_probabilities_from_other_weights_change_the_distribution() -> None:
    """The test mixes two versions in a block: the tokens of one, and the probabilities of the other."""
    probs = torch.softmax(VERSIONS[1], dim=-1)

    def mixed(block: Block, _: random.Random) -> Block:
        assert block.tree.probs is not None
        rows = range(len(block.tree.tokens))
        before = [1, *block.tree.tokens]
        weights = tuple([tuple((60_000 * probs[before[row]]).int().tolist()) for row in rows])
        ids = tuple([tuple(range(small.VOCABULARY)) for _ in rows])
        return replace(block, tree=replace(block.tree, probs=SparseProbs(ids, weights)))

    setting = Setting(small.TARGET, VERSIONS[0], Acceptance.REJECTION, calm, ahead=0, altered=mixed)
    world = World(setting, small.SESSIONS, 11)
    assert small.p_value(setting, world.run()) < small.FALSE_ALARM


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [
        ("chains", calm),
        ("chains", near_patience),
        ("interrupted", lossy_delays),
        ("two a forward", lossy_delays),
        ("recurrent", calm),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_coupled_texts_are_those_of_plain_decoding(variant: str, schedule: Schedule) -> None:
    setting = Setting(small.TARGET, VERSIONS[0], Acceptance.COUPLED, schedule, new_tokens=6, **VARIANTS[variant])
    world = ExchangingWorld(setting, small.EQUAL_SESSIONS, 11, VERSIONS)
    assert world.run() == small.plain_texts(6, small.EQUAL_SESSIONS, seed=11)
    assert world.swaps_with_sessions > LEAST_SWAPS


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "seeded"])
def test_texts_over_trees_are_those_of_plain_decoding(temperature: float, schedule: Schedule) -> None:
    sampling = Sampling(temperature=temperature)
    versions = [trees.DRAFT, trees.DRAFT.flip(1)]
    altered = trees.into_a_tree(prompt_len=3)
    setting = replace(trees.SETTING, sampling=sampling, schedule=schedule, altered=altered)
    made = [
        ExchangingWorld(replace(setting, prompt=(1 + seed, 7, 8)), trees.AT_ONCE, seed, versions)
        for seed in range(trees.WORLDS)
    ]
    texts = [text for world in made for text in world.run()]
    assert texts == trees.without_drafts(sampling)
    assert sum(world.swaps_with_sessions for world in made) > LEAST_SWAPS
    assert sum(world.branches_accepted for world in made) > 1
