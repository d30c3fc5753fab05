"""Tests the cost model of a running deployment, combined from its replicas' published costs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from cluster.speculation.estimators import AcceptanceCounts
from cluster.telemetry import Actor, Event, Recording
from serve_app.operations.ray_cluster import ClusterError, check_reachable, cost_model

NO_BLOCKS = AcceptanceCounts()


def a_target(base_s: float, counts: AcceptanceCounts = NO_BLOCKS) -> dict[str, Any]:
    drafts = ForwardCost.linear(base_s, per_token_s=0.001)
    plain = ForwardCost.linear(0.9 * base_s)
    costs = {"costs": drafts.model_dump_json(), "non_speculative_costs": plain.model_dump_json()}
    return costs | {"acceptance": asdict(counts)}


def a_drafter(token_s: float) -> dict[str, str]:
    return {"costs": DraftCost(forward=ForwardCost.linear(token_s), per_pass_s=0.0005).model_dump_json()}


def test_the_median_replica_represents_its_pool():
    costs = cost_model([a_target(0.3), a_target(0.1), a_target(0.2)], [a_drafter(0.002)], [])
    assert costs.target == ForwardCost.linear(0.2, per_token_s=0.001)
    assert costs.non_speculative_s(4) == pytest.approx(0.9 * 0.2), "of the same replica"
    assert costs.draft.seconds(4, 3) == pytest.approx(0.0005 + 3 * 0.002)
    assert costs.hop_s == CostModel.model_fields["hop_s"].default, "no message has been timed"


def test_no_cost_without_a_non_speculative_step():
    costs = cost_model([a_target(0.1) | {"non_speculative_costs": None}], [a_drafter(0.002)], [])
    assert costs.non_speculative is None
    assert costs.non_speculative_s(1) == costs.target.seconds(1, 1)


def test_message_delay_is_read_from_timelines():
    sent = Recording(0.0, (Event(0, 1.0, "sent", ("s",)),))
    drafter_events = Recording(0.0, (Event(0, 1.002, "block", ("s",)),))
    actors = [Actor("drafter", "drafter 1", sent), Actor("target", "target 2", drafter_events)]
    assert cost_model([a_target(0.1)], [a_drafter(0.1)], actors).hop_s == pytest.approx(0.002)


def test_blocks_sent_during_a_pass_count_like_others():
    passes = [(0, 1.0, "drafted"), (1, 2.0, "draft ahead"), (2, 2.03, "sent"), (3, 2.1, "drafted")]
    sent = Recording(0.0, tuple(Event(order, at, name, ("s",)) for order, at, name in passes))
    drafter_events = Recording(0.0, (Event(0, 2.032, "block", ("s",)),))
    actors = [Actor("drafter", "drafter 1", sent), Actor("target", "target 2", drafter_events)]
    assert cost_model([a_target(0.1)], [a_drafter(0.1)], actors).hop_s == pytest.approx(0.002)


def test_time_between_steps_is_part_of_a_step():
    """Only the shortest gaps count; longer gaps include waiting for blocks or idling."""
    times = [(1.0, 1.1), (1.103, 1.2), (1.203, 1.3), (1.4, 1.5), (2.5, 2.6)]
    events = [(at, name) for began, ended in times for at, name in ((began, "verify"), (ended, "decided"))]
    recorded = tuple(Event(order, at, name, ("s",)) for order, (at, name) in enumerate(events))
    costs = cost_model([a_target(0.1)], [a_drafter(0.1)], [Actor("target", "target 1", Recording(0.0, recorded))])
    assert costs.target.seconds(1, 1) == pytest.approx(0.101 + 0.003)
    assert costs.non_speculative_s(1) == pytest.approx(0.09), "plain steps were timed with what lies between them"


def test_acceptance_covers_all_targets():
    known = AcceptanceCounts(reached=(60, 30), accepted=(30, 30)), AcceptanceCounts(reached=(40, 10), accepted=(10, 0))
    costs = cost_model([a_target(0.1, counts) for counts in known], [a_drafter(0.1)], [])
    assert costs.acceptance == (0.4, 0.75)


def test_no_acceptance_from_few_blocks():
    few = AcceptanceCounts(reached=(3,), accepted=(3,))
    assert cost_model([a_target(0.1, few)], [a_drafter(0.1)], []).acceptance is None


@pytest.mark.parametrize(("targets", "drafters"), [([], [a_drafter(1)]), ([a_target(1)], [])])
def test_a_pool_without_replicas_is_named(targets, drafters):
    with pytest.raises(ClusterError, match="no replica has published"):
        cost_model(targets, drafters, [])


def test_saved_costs_round_trip(tmp_path: Path):
    counts = AcceptanceCounts(reached=(300, 100), accepted=(100, 70))
    costs = cost_model([a_target(0.1, counts)], [a_drafter(0.1)], [])
    assert costs.acceptance == (1 / 3, 0.7)
    costs.save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == costs


def test_files_with_only_costs_are_read(tmp_path: Path):
    path = tmp_path / "costs.json"
    costs = cost_model([a_target(0.1)], [a_drafter(0.1)], [])
    path.write_text(costs.model_dump_json(exclude={"acceptance"}))
    assert CostModel.load(path) == costs


@pytest.mark.parametrize("address", ["nowhere", ":6379", "host:", "host:port"])
def test_an_invalid_address_is_refused(address):
    with pytest.raises(ClusterError, match="expected host:port"):
        check_reachable(address)


def test_ray_finds_its_own_cluster():
    check_reachable("auto")


def test_an_earlier_key_is_refused_with_its_new_name(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"plain": null}')
    with pytest.raises(ConfigError, match="plain was renamed to non_speculative"):
        CostModel.load(path)
