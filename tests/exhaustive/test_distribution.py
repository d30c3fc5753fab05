"""The chi-square tests of `tests/lossless` over four times as many sessions, where half as large a bias shows.

Not part of the default suite: `make test-exhaustive`. Here too a test has a false-alarm rate of 1e-5.
"""

import pytest

from protos.messages import Acceptance
from tests.lossless import test_pools
from tests.lossless.test_distribution import (
    FALSE_ALARM,
    drafted_ahead,
    drafting_ahead,
    in_all_ways,
    p_value,
    p_value_of,
)
from tests.lossless.test_suffix_lookup import p_value_over_answers_of_others
from tests.lossless.world import calm, stormy

WORLDS = 240


@in_all_ways
def test_drafting_ahead_for_several_outcomes_keeps_the_distribution(schedule, pages, several):
    setting = drafting_ahead(Acceptance.RATIO, schedule, pages, several)
    assert p_value(setting, drafted_ahead(setting, range(WORLDS))) > FALSE_ALARM


@pytest.mark.parametrize("schedule", [calm, stormy], ids=lambda s: s.__name__)
def test_losses_lookups_and_dear_verification_keep_the_distribution(schedule):
    exact = test_pools.exact_distribution(test_pools.FEW_PROMPT)
    assert p_value_of(exact, test_pools.texts_with_losses(schedule, WORLDS)) > FALSE_ALARM


@pytest.mark.parametrize("schedule", [calm, stormy], ids=lambda s: s.__name__)
def test_suffix_lookup_keeps_the_distribution(schedule):
    assert p_value_over_answers_of_others(schedule, WORLDS) > FALSE_ALARM
