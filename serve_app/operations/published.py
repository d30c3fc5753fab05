"""The costs of a running deployment, as its replicas measure them: the input of `slipstream plan --costs`.

With them goes what draft tokens were accepted.

What replicas measured at their start is in their Serve metadata, which does not change.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.speculation.acceptance import AcceptanceCounts
from cluster.telemetry import Actor, Span, spans
from serve_app.operations.ray_cluster import ClusterError, broadcast, connected, deployed
from serve_app.operations.recordings import recordings

HOPS = ("send", "return")  # spans that are a message's way


def live_costs(address: str, application: str) -> CostModel:
    """Raises ClusterError when the cluster or the application cannot be reached."""
    with connected(address):
        actors = recordings(application)
        targets, drafters = (broadcast(deployed(pool, application), "inspect") for pool in ("Target", "Drafter"))
    return cost_model(targets, drafters, actors)


def cost_model(
    targets: Iterable[Mapping[str, Any]], drafters: Iterable[Mapping[str, Any]], actors: Sequence[Actor]
) -> CostModel:
    """One model of a fleet, of what its replicas answer to `inspect` and of their recordings.

    The replica in the middle of each pool, the messages' median time, and the acceptance of all blocks. What lies
    between two steps counts as part of a step; plain ones, where a replica knows them, were measured with it.
    """
    targets = list(targets)
    steps = [(ForwardCost.model_validate_json(one["costs"]), _plain(one)) for one in targets]
    passes = [DraftCost.model_validate_json(one["costs"]) for one in drafters]
    if not (steps and passes):
        raise ClusterError("no replica has published its costs yet; expected a target and a drafter that run")
    target, plain = sorted(steps, key=lambda costs: _one_token_s(costs[0]))[len(steps) // 2]
    draft = sorted(passes, key=_one_token_s)[len(passes) // 2]
    found = spans(actors)
    target = target.plus(_between_steps_s(found))
    costs = CostModel(target=target, draft=draft, plain=plain, acceptance=_acceptance(targets))
    hops = [span.ended_s - span.began_s for span in found if span.name in HOPS]
    return costs.model_copy(update={"hop_s": max(0.0, median(hops))}) if hops else costs


def _plain(target: Mapping[str, Any]) -> ForwardCost | None:
    published = target["plain_costs"]
    return None if published is None else ForwardCost.model_validate_json(published)


def _acceptance(targets: Iterable[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """By position in a block; None where too few were verified."""
    counts = [AcceptanceCounts(**one["acceptance"]) for one in targets]
    return sum(counts, AcceptanceCounts()).by_position() or None


def _between_steps_s(found: Sequence[Span]) -> float:
    """From one step's end to the next's beginning where nothing is waited for: the lower quartile."""
    gaps: list[float] = []
    for actor in {span.actor for span in found}:
        steps = [span for span in found if span.actor == actor and span.name == "verify"]
        gaps += [max(0.0, later.began_s - earlier.ended_s) for earlier, later in pairwise(steps)]
    return quantiles(gaps, n=4)[0] if len(gaps) > 1 else 0.0


def _one_token_s(cost: ForwardCost | DraftCost) -> float:
    """What replicas of one pool are compared by."""
    return cost.seconds(1, 1)
