"""The cost model of drafting passes takes its shape from a profile and its scale from live passes."""

import pytest

from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.lookahead import DraftTiming

PROFILE = DraftCost(forward=ForwardCost.linear(0.003, per_row_s=0.001), per_pass_s=0.002)


def test_a_profile_holds_until_passes_are_measured():
    timing = DraftTiming(PROFILE)
    assert timing.cost == PROFILE
    for _ in range(100):
        timing = timing.after(["a", "b"], 3, 1.5 * PROFILE.seconds(2, 3))
    assert timing.cost.seconds(4, 2) == pytest.approx(1.5 * PROFILE.seconds(4, 2))


def test_passes_with_prompts_or_without_blocks_are_not_measured():
    timing = DraftTiming(PROFILE).after(["a"], 2, 9.0).after(["a", "b"], 2, 9.0).after(["a"], 0, 9.0)
    assert timing.cost == PROFILE
    timing = timing.without(["a"]).after(["a"], 2, 9.0)
    assert timing.cost == PROFILE, "another session may have the name again"
    assert timing.after(["a"], 2, 9.0).cost != PROFILE
    assert timing.without(["a", "b"]).read == frozenset()
