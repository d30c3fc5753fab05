"""Random trees give the text of non-speculative decoding, on every schedule and with preemption.

In transit, every block becomes a tree of the target's likely tokens, including lookahead, late and repeated blocks.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Block, Sampling
from tests.lossless.parts import Setting
from tests.lossless.test_reference_loop import AT_ONCE, DRAFT, NEW_TOKENS, TARGET, VOCABULARY, WORLDS
from tests.lossless.world import World, accepted, calm, lossy_delays, near_patience, run_worlds, texts

BLOCK_LEN = 6
FEW_PAGES = 18  # shared by all sessions; one session may need 14
LIKELY = TARGET.topk(2, dim=-1).indices.tolist()  # after each token


def into_a_tree(prompt_len: int) -> Callable[[Block, random.Random], Block]:
    """Returns a tree with as many nodes as allowed, each child a likely token after its parent."""
    context = prompt_len + NEW_TOKENS

    def altered(block: Block, rng: random.Random) -> Block:
        tokens: list[int] = []
        parents: list[int] = []
        children: set[tuple[int, int]] = set()
        for _ in range(min(BLOCK_LEN, context - block.base_len - 1)):
            parent = rng.randrange(-1, len(tokens))
            likely = [block.tree.tokens[0], rng.randrange(VOCABULARY)] if parent < 0 else LIKELY[tokens[parent]]
            token = rng.choices(likely, weights=(3, 1))[0]
            if (parent, token) not in children:
                children.add((parent, token))
                parents.append(parent)
                tokens.append(token)
        return replace(block, tree=DraftTree(tuple(tokens), tuple(parents)))

    return altered


def worlds(setting: Setting) -> list[World]:
    return run_worlds(setting, AT_ONCE, [(1 + seed, 7, 8) for seed in range(WORLDS)])


SETTING = Setting(TARGET, DRAFT, Acceptance.COUPLED, calm, BLOCK_LEN, NEW_TOKENS, ahead=4)


@functools.cache
def without_drafts(sampling: Sampling) -> list[tuple[int, ...]]:
    return texts(worlds(replace(SETTING, draft_tokens=0, sampling=sampling)))


@pytest.mark.parametrize(
    ("schedule", "pages"),
    [
        pytest.param(calm, 4096, id="calm"),
        pytest.param(calm, FEW_PAGES, id="calm with preemption"),
        pytest.param(lossy_delays, FEW_PAGES, id="stormy with preemption"),
        pytest.param(near_patience, 4096, id="near patience"),
    ],
)
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.0), id="greedy"),
        pytest.param(Sampling(temperature=0.7), id="coupled"),
        pytest.param(Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.5), id="penalties"),
        pytest.param(Sampling(temperature=0.0, presence_penalty=0.7), id="greedy with penalties"),
    ],
)
def test_random_trees_give_the_text_of_non_speculative_decoding(sampling, schedule, pages):
    altered = into_a_tree(prompt_len=3)
    grown = worlds(replace(SETTING, schedule=schedule, sampling=sampling, pages=pages, altered=altered))
    assert texts(grown) == without_drafts(sampling)
    assert sum(world.branches_accepted for world in grown) > 1, "no tree mattered, so this proves nothing"
    assert accepted(grown) > len(without_drafts(sampling))
    assert (sum(world.verification.admission.preempted for world in grown) > 0) == (pages < 4096)


def test_under_rejection_sampling_trees_are_dropped_and_counted():
    made = worlds(replace(SETTING, acceptance=Acceptance.REJECTION, altered=into_a_tree(prompt_len=3)))
    assert all(world.verification.counts.dropped["tree"] > 0 for world in made)
    assert all(session.committed for world in made for session in world.sessions.values())
