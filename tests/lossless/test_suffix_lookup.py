"""Suffix lookup learns from every text but changes none.

One method serves several worlds, so its drafts also come from other sessions' answers.
"""

from dataclasses import replace
from functools import partial

import pytest

from actors.drafters.lookup.suffix import SuffixLookup
from cluster.config_sections import SuffixOptions
from protos.messages import Acceptance, Sampling
from tests.lossless.parts import Schedule, Setting, a_draft_scheduler
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, FEW, FEW_WORLDS, p_value
from tests.lossless.test_distribution import TARGET as FEW_TOKENS
from tests.lossless.test_reference_loop import AT_ONCE, BLOCK_LEN, DRAFT, NEW_TOKENS, TARGET, without_drafts
from tests.lossless.world import ToyDrafter, World, accepted, calm, lossy_delays, near_patience, run_worlds, texts


class SuffixWorld(World):
    """World that drafts with an existing lookup."""

    def __init__(self, method: SuffixLookup, setting: Setting, sessions: int, seed: int) -> None:
        self._method = method
        super().__init__(setting, sessions, seed)

    def _new_drafter(self) -> ToyDrafter:
        beside = super()._new_drafter()
        return ToyDrafter(a_draft_scheduler(self._setting, self._count), self._method, beside.model)


def a_method() -> SuffixLookup:
    return SuffixLookup(SuffixOptions(max_ngram=4, min_ngram=1), clock=lambda: 0.0)


@pytest.mark.parametrize("schedule", [calm, lossy_delays, near_patience], ids=lambda s: s.__name__)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.4)], ids=["greedy", "coupled"])
def test_suffix_lookup_gives_the_text_of_non_speculative_decoding(sampling, schedule):
    method = a_method()
    setting = Setting(TARGET, DRAFT, Acceptance.COUPLED, schedule, BLOCK_LEN, NEW_TOKENS, sampling, ahead=4)
    found = run_worlds(setting, AT_ONCE, [(1,), (2,)], partial(SuffixWorld, method))
    assert texts(found) == without_drafts(sampling)
    assert accepted(found) > AT_ONCE, "too few drafts, so this proves nothing"


def test_branches_of_trees_are_accepted():
    method = a_method()
    setting = Setting(TARGET, DRAFT, Acceptance.COUPLED, calm, BLOCK_LEN, NEW_TOKENS, Sampling(temperature=0.7))
    found = run_worlds(setting, AT_ONCE, [setting.prompt] * 4, partial(SuffixWorld, method))
    assert sum(world.branches_accepted for world in found) > 4


def p_value_over_answers_of_others(schedule: Schedule, worlds: int) -> float:
    """Returns the p-value of texts drafted from other sessions' answers and from the sessions' own."""
    setting = Setting(
        FEW_TOKENS, DRAFTERS["bad"], Acceptance.REJECTION, schedule, new_tokens=6, ahead=2, interruption=0.1
    )
    samples: list[tuple[int, ...]] = []
    drafts_accepted = 0
    method = a_method()
    SuffixWorld(method, replace(setting, acceptance=Acceptance.COUPLED), 50, seed=999).run()
    for seed in range(worlds):
        world = SuffixWorld(method, setting, FEW, seed)
        samples += world.run()
        drafts_accepted += world.accepted
    assert drafts_accepted > len(samples) / 4, "too few drafts, so this proves nothing"
    return p_value(setting, samples)


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__)
def test_under_rejection_sampling_the_distribution_is_the_targets(schedule):
    assert p_value_over_answers_of_others(schedule, FEW_WORLDS) > FALSE_ALARM
