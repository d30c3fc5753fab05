"""Trees of a text's own continuations, alone and merged with a draft model's, change no text.

The models mostly repeat themselves, so a text contains several continuations.
"""

from dataclasses import replace

import pytest
import torch

from actors.drafters.lookup import hybrid
from cluster.drafting.requests import Proposal
from protos.messages import Acceptance, Sampling
from tests.lossless.history import NextLogits, disturbed, drawn_by_history
from tests.lossless.parts import EOS, Setting
from tests.lossless.pools import Pools, PoolWorld
from tests.lossless.test_pools import AT_ONCE, DEAR, UNUSED, VOCABULARY, WORLDS, plainly
from tests.lossless.world import accepted, calm, lossy_delays, near_patience, run_worlds

NEW_TOKENS = 40
NEW_TOKENS_ALONE = 60  # lookup drafts only after a repetition
NODES = 6


def repeating(vocabulary: int, seed: int) -> NextLogits:
    """Returns logits that depend on the last token, and slightly on all earlier tokens, so wrong pages change texts."""
    mostly = drawn_by_history(vocabulary, seed, scale=2.0)
    rest = drawn_by_history(vocabulary, seed + 1, scale=0.5)
    never = torch.zeros(vocabulary)
    never[EOS] = -6.0
    return lambda tokens: mostly(tokens[-1:]) + rest(tokens) + never


TARGET = repeating(VOCABULARY, seed=11)
DRAFT = disturbed(TARGET, drawn_by_history(VOCABULARY, seed=13, scale=1.0))
SETTING = Setting(UNUSED, UNUSED, Acceptance.COUPLED, calm, NODES, NEW_TOKENS, ahead=4, interruption=0.1)
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "coupled": Sampling(temperature=0.7),
    "penalties": Sampling(temperature=0.7, top_p=0.9, frequency_penalty=0.1),
}


def worlds(setting: Setting, pools: Pools) -> list[PoolWorld]:
    """Runs worlds, and asserts that texts equal those of non-speculative decoding."""
    prompts = [(1, 2, 3 + seed) for seed in range(WORLDS)]
    made = run_worlds(setting, AT_ONCE, prompts, lambda setting, count, seed: PoolWorld(setting, pools, count, seed))
    for world in made:
        for session in world.sessions.values():
            assert session.committed == plainly(session.generation, TARGET)
    return made


@pytest.mark.parametrize("schedule", [calm, lossy_delays, near_patience], ids=lambda s: s.__name__)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_trees_of_continuations_give_the_text_of_non_speculative_decoding(sampling, schedule):
    pools = Pools(TARGET, DRAFT, lookup_alone=True)
    made = worlds(replace(SETTING, schedule=schedule, sampling=sampling, new_tokens=NEW_TOKENS_ALONE), pools)
    assert sum(world.branches_accepted for world in made) > 1, "no tree mattered, so this proves nothing"
    assert accepted(made) > AT_ONCE


@pytest.mark.parametrize(
    ("schedule", "step_cost"),
    [
        pytest.param(calm, None, id="calm"),
        pytest.param(lossy_delays, None, id="stormy"),
        pytest.param(near_patience, DEAR, id="near patience, verification dear"),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_merged_trees_give_the_text_of_non_speculative_decoding(monkeypatch, sampling, schedule, step_cost):
    of_both: list[bool] = []

    def merged(one: Proposal, other: Proposal, most: int, least_chance: float) -> Proposal:
        found = merge(one, other, most, least_chance)
        nodes = {found.tree.main_path, *found.tree.off_main_path}
        of_both.append(not any(nodes <= {each.tree.main_path, *each.tree.off_main_path} for each in (one, other)))
        return found

    merge = hybrid.merged
    monkeypatch.setattr(hybrid, "merged", merged)
    pools = Pools(TARGET, DRAFT, lost_targets=1, lost_drafters=1, hybrid=True)
    made = worlds(replace(SETTING, schedule=schedule, sampling=sampling, step_cost=step_cost), pools)
    assert sum(of_both) > AT_ONCE, "too few trees had candidates of both"
    assert sum(world.branches_accepted for world in made) > 1
    assert accepted(made) > AT_ONCE * WORLDS
