"""Tests the cache gain and the imbalance from placing conversations on targets with cached prefixes."""

from statistics import mean

import pytest

from tests.unit.cluster.routing.conversations import Outcome, outcomes


def line(name: str, outcome: Outcome) -> str:
    return (
        f"{name}: {outcome.cached_share:.2f} of the prompt tokens in the cache; the busiest target"
        f" {mean(outcome.ahead):.1f} sessions ahead of the idlest (at most {max(outcome.ahead)}) of"
        f" {mean(outcome.sessions):.0f} in all"
    )


@pytest.mark.parametrize(("targets", "systems"), [(2, 1), (4, 8), (8, 8)])
def test_conversations_hit_cached_prefixes_without_unbalancing_targets(targets: int, systems: int) -> None:
    """The caches are large enough for every conversation."""
    by_load, by_prefix = outcomes(targets, pages=12_000, systems=systems, seed=1)
    print(f"\n{targets} targets, {systems} system prompts\n  {line('load', by_load)}\n  {line('prefix', by_prefix)}")
    assert by_prefix.cached_share > by_load.cached_share + 0.05
    assert by_prefix.cached_share > 0.8
    assert mean(by_prefix.ahead) < 4.0, "what a cached beginning is worth at most"
    assert max(by_prefix.ahead) <= 5 + max(by_load.ahead), "the rest is who happens to end first"
    assert by_load.routed.keys() <= {"load", "prefix"}
    assert by_prefix.routed["prefix"] > by_prefix.routed["load"]


def test_evictions_do_not_unbalance_the_targets() -> None:
    """The caches barely exceed the running sessions, so the router overestimates the cached prefixes."""
    by_load, by_prefix = outcomes(targets=4, pages=1500, systems=8, seed=1)
    print(f"\nsmall caches\n  {line('load', by_load)}\n  {line('prefix', by_prefix)}")
    assert by_prefix.cached_share > by_load.cached_share
    assert mean(by_prefix.ahead) < 4.0
