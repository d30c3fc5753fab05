"""Heads that predict several tokens from the target's states, through the whole world: chains, trees, and ahead."""

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
from tests.lossless.world import World, calm, near_patience, stormy

WORLDS = 2
EACH_KIND = pytest.mark.parametrize(
    "kind", [PlacesWorld, TokensWorld, EagleWorld], ids=["by place", "by token", "beside tokens"]
)


def worlds_of(kind: type[World], setting: Setting) -> list[World]:
    worlds = [kind(replace(setting, prompt=tuple(range(1, 8 + seed))), AT_ONCE, seed) for seed in range(WORLDS)]
    for world in worlds:
        world.run()
    return worlds


def texts_of(worlds: list[World]) -> list[tuple[int, ...]]:
    return [session.committed for world in worlds for session in world.sessions.values()]


GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.7)
PENALISED = Sampling(temperature=1.0, frequency_penalty=0.5)


@EACH_KIND
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize(
    ("sampling", "schedule"),
    [
        pytest.param(GREEDY, calm, id="greedy, calm"),
        pytest.param(GREEDY, near_patience, id="greedy, near patience"),
        pytest.param(COUPLED, calm, id="coupled, calm"),
        pytest.param(COUPLED, stormy, id="coupled, stormy"),
        pytest.param(PENALISED, calm, id="penalties, calm"),
    ],
)
def test_blocks_of_heads_decide_what_plain_decoding_does(
    sampling: Sampling, schedule: Any, keeps: bool, kind: Any
) -> None:
    """Trees and blocks ahead of verdicts among them, on every schedule, with a pass cut short now and then."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=schedule, block_len=BLOCK_LEN, interruption=0.1, pages=64)
    setting = replace(drafted, reads_states=True, keeps_states=keeps)
    worlds = worlds_of(kind, setting)
    assert texts_of(worlds) == texts_of(worlds_of(World, plain))
    accepted = sum(session.counts.accepted for world in worlds for session in world.sessions.values())
    assert accepted > (len(texts_of(worlds)) if schedule is calm else 0), "hardly any draft stood: this showed nothing"
    assert sum(world.branches_accepted for world in worlds) > 0, "no tree stood along another path than its first"
    assert sum(world.drafting.counts["guess_hit"] for world in worlds) > 0, "no block ahead of a verdict was of use"


@EACH_KIND
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_heads_that_begin_in_mid_text_decide_what_plain_decoding_does(sampling: Sampling, kind: Any) -> None:
    """Drafters and targets are lost, so that sessions come to drafters in their middle."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=stormy, block_len=BLOCK_LEN, interruption=0.1, pages=64)
    worlds = worlds_of(kind, replace(drafted, reads_states=True, keeps_states=False, enough_states=2))
    assert texts_of(worlds) == texts_of(worlds_of(World, plain))
    methods = [drafter.method for world in worlds for drafter in world.drafters.values()]
    late = sum(method.begun_late for method in methods if isinstance(method, ReadingMethod))
    assert late > 0, "no text began in its middle: this showed nothing"
    assert sum(session.counts.accepted for world in worlds for session in world.sessions.values()) > 0


@EACH_KIND
@pytest.mark.parametrize(("new_tokens", "interruption"), [(4, 0.0), (5, 0.1)], ids=["whole passes", "interrupted"])
def test_under_ratio_blocks_ahead_of_heads_keep_the_distribution(
    new_tokens: int, interruption: float, kind: Any
) -> None:
    """Tests all texts by chi-square, with a false-alarm rate of 1e-5 per case."""
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
    assert hits > len(samples) / 10, "blocks ahead were hardly used: this showed nothing"
