"""Heads that predict several tokens from the target's hidden states: chains, trees, and blocks drafted ahead."""

from dataclasses import replace
from typing import Any

import pytest

from protos.messages import Acceptance, Sampling
from tests.lossless.heads import EagleWorld, PlacesWorld, TokensWorld
from tests.lossless.parts import Setting
from tests.lossless.states import ReadingMethod
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, FEW, FEW_WORLDS, p_value
from tests.lossless.test_distribution import TARGET as FEW_TOKENS
from tests.lossless.test_reference_loop import AT_ONCE, BLOCK_LEN, NEW_TOKENS, TARGET
from tests.lossless.world import World, accepted, calm, lossy_delays, near_patience, run_worlds, texts

WORLDS = 3
EACH_KIND = pytest.mark.parametrize(
    "kind", [PlacesWorld, TokensWorld, EagleWorld], ids=["by place", "by token", "beside tokens"]
)


def worlds_of(kind: type[World], setting: Setting) -> list[World]:
    return run_worlds(setting, AT_ONCE, [range(1, 8 + seed) for seed in range(WORLDS)], kind)


GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.7)
PENALIZED = Sampling(temperature=1.0, frequency_penalty=0.5)


@EACH_KIND
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize(
    ("sampling", "schedule"),
    [
        pytest.param(GREEDY, calm, id="greedy, calm"),
        pytest.param(GREEDY, near_patience, id="greedy, near patience"),
        pytest.param(COUPLED, calm, id="coupled, calm"),
        pytest.param(COUPLED, lossy_delays, id="coupled, stormy"),
        pytest.param(PENALIZED, calm, id="penalties, calm"),
    ],
)
def test_blocks_of_heads_give_the_text_of_non_speculative_decoding(
    sampling: Sampling, schedule: Any, keeps: bool, kind: Any
) -> None:
    """The cases include trees and lookahead blocks, on every schedule, with interrupted passes."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=schedule, draft_tokens=BLOCK_LEN, interruption=0.1, pages=64)
    setting = replace(drafted, reads_states=True, keeps_states=keeps)
    worlds = worlds_of(kind, setting)
    assert texts(worlds) == texts(worlds_of(World, plain))
    assert accepted(worlds) > (len(texts(worlds)) if schedule is calm else 0), "too few drafts, so this proves nothing"
    assert sum(world.branches_accepted for world in worlds) > 0, "no tree mattered"
    assert sum(world.drafting.counts["guess_hit"] for world in worlds) > 0, "no block drafted ahead was used"


@EACH_KIND
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_heads_that_begin_late_give_the_text_of_non_speculative_decoding(sampling: Sampling, kind: Any) -> None:
    """Lost messages delay the drafters' sessions."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=lossy_delays, draft_tokens=BLOCK_LEN, interruption=0.1, pages=64)
    worlds = worlds_of(kind, replace(drafted, reads_states=True, keeps_states=False, enough_states=2))
    assert texts(worlds) == texts(worlds_of(World, plain))
    methods = [drafter.method for world in worlds for drafter in world.drafters.values()]
    late = sum(method.begun_late for method in methods if isinstance(method, ReadingMethod))
    assert late > 0, "no drafter began within a text, so this proves nothing"
    assert accepted(worlds) > 0


@EACH_KIND
@pytest.mark.parametrize(("new_tokens", "interruption"), [(4, 0.0), (5, 0.1)], ids=["whole passes", "interrupted"])
def test_under_rejection_sampling_blocks_ahead_of_heads_keep_the_distribution(
    new_tokens: int, interruption: float, kind: Any
) -> None:
    """Chi-square tests over all texts have a false-alarm rate of 1e-5 per case."""
    setting = Setting(
        FEW_TOKENS,
        DRAFTERS["good"],
        Acceptance.REJECTION,
        calm,
        new_tokens=new_tokens,
        prompt=(2, 1),
        interruption=interruption,
        reads_states=True,
    )
    worlds = [kind(setting, FEW, seed) for seed in range(FEW_WORLDS)]
    samples = [text for world in worlds for text in world.run()]
    assert p_value(setting, samples) > FALSE_ALARM
    hits = sum(world.drafting.counts["guess_hit"] for world in worlds)
    assert hits > len(samples) / 10, "too few blocks ahead, so this proves nothing"
