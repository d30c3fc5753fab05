"""Methods that read the target's hidden states: each state is of its own text, or is missing, whatever is lost."""

from collections import Counter
from dataclasses import replace

import pytest

from protos.messages import Acceptance, Sampling
from tests.lossless.parts import Setting
from tests.lossless.states import ReadingMethod
from tests.lossless.test_reference_loop import AT_ONCE, BLOCK_LEN, DRAFT, NEW_TOKENS, TARGET
from tests.lossless.world import World, calm, near_patience, stormy

WORLDS = 3


def texts_of(setting: Setting) -> tuple[list[tuple[int, ...]], list[World]]:
    """The method itself checks what it is told."""
    worlds = [World(replace(setting, prompt=tuple(range(1, 8 + seed))), AT_ONCE, seed) for seed in range(WORLDS)]
    return [text for world in worlds for text in world.run()], worlds


def rows_read(worlds: list[World]) -> int:
    methods = [drafter.method for world in worlds for drafter in world.drafters.values()]
    return sum(method.rows_read for method in methods if isinstance(method, ReadingMethod))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("pages", [4096, 40], ids=["pages for all", "preemption"])
@pytest.mark.parametrize("schedule", [calm, stormy, near_patience], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7)], ids=["greedy", "temperature 0.7"]
)
def test_the_text_is_that_of_plain_decoding_and_drafts_are_made_of_the_right_states(sampling, schedule, pages, keeps):
    plain = Setting(TARGET, DRAFT, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    drafted = replace(plain, schedule=schedule, block_len=BLOCK_LEN)
    setting = replace(drafted, reads_states=True, pages=pages, keeps_states=keeps)
    texts, worlds = texts_of(setting)
    assert texts == texts_of(plain)[0]
    accepted = sum(session.counts.accepted for world in worlds for session in world.sessions.values())
    assert accepted > len(texts), "it was hardly ever drafted from states, so this showed nothing"
    assert rows_read(worlds) > len(texts) * NEW_TOKENS / 2
    if not sampling.greedy:  # else all sessions share their pages
        assert (sum(world.verification.preempted for world in worlds) > 0) == (pages < 4096)
    counts = sum((Counter(world.verification.feeds.counts) for world in worlds), Counter[str]())
    assert (counts["again"] > 0) != keeps, "what is not kept is computed again after a prefix hit or a loss"
    assert counts["lost"] == 0
    assert all(world.verification.feeds.rows["verdict"] > 0 for world in worlds), "none rode with a verdict"
    assert sum(world.branches_accepted for world in worlds) > 0, "no tree stood along another path than its first"
