"""A method that reads hidden states receives only states of its own text, whatever is lost; it checks each state."""

from collections import Counter
from dataclasses import replace

import pytest

from protos.messages import Acceptance, Sampling
from tests.lossless.parts import Setting
from tests.lossless.states import ReadingMethod
from tests.lossless.test_reference_loop import AT_ONCE, BLOCK_LEN, DRAFT, NEW_TOKENS, TARGET
from tests.lossless.world import World, accepted, calm, lossy_delays, near_patience, run_worlds, texts

WORLDS = 3


def worlds_of(setting: Setting) -> list[World]:
    return run_worlds(setting, AT_ONCE, [range(1, 8 + seed) for seed in range(WORLDS)])


def rows_read(worlds: list[World]) -> int:
    methods = [drafter.method for world in worlds for drafter in world.drafters.values()]
    return sum(method.rows_read for method in methods if isinstance(method, ReadingMethod))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("pages", [4096, 40], ids=["pages for all", "preemption"])
@pytest.mark.parametrize("schedule", [calm, lossy_delays, near_patience], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7)], ids=["greedy", "temperature 0.7"]
)
def test_drafts_from_states_give_the_text_of_non_speculative_decoding(sampling, schedule, pages, keeps):
    plain = Setting(TARGET, DRAFT, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=schedule, draft_tokens=BLOCK_LEN)
    setting = replace(drafted, reads_states=True, pages=pages, keeps_states=keeps)
    worlds = worlds_of(setting)
    found = texts(worlds)
    assert found == texts(worlds_of(plain))
    assert accepted(worlds) > len(found), "too few drafts, so this proves nothing"
    assert rows_read(worlds) > len(found) * NEW_TOKENS / 2
    if not sampling.greedy:  # otherwise all sessions share their pages
        assert (sum(world.verification.admission.preempted for world in worlds) > 0) == (pages < 4096)
    counts = sum((Counter(world.verification.feeds.counts) for world in worlds), Counter[str]())
    assert (counts["again"] > 0) != keeps, "states that are not kept are computed again after a prefix hit or a loss"
    assert counts["lost"] == 0
    assert all(world.verification.feeds.rows["verdict"] > 0 for world in worlds), "none went with a verdict"
    assert sum(world.branches_accepted for world in worlds) > 0, "no tree mattered"
