"""The costs of a running deployment, as its replicas publish them: what `slipstream plan --costs` reads.

Knows nothing of how they were measured.
"""

from collections.abc import Iterable, Sequence
from statistics import median

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.ray_membership import published_costs
from cluster.timeline import Actor, spans
from serve_app.ray_cluster import ClusterError, connected, deployed
from serve_app.trace import recordings

HOPS = ("send", "return")  # spans that are a message's way


def live_costs(address: str, application: str) -> CostModel:
    """Raises ClusterError when the cluster or the application cannot be reached."""
    with connected(address):
        actors = recordings(application)
        targets = published_costs(deployed("Target", application))
        drafters = published_costs(deployed("Drafter", application))
    return cost_model(targets, drafters, actors)


def cost_model(targets: Iterable[str], drafters: Iterable[str], actors: Sequence[Actor]) -> CostModel:
    """One model of a fleet: the replica in the middle of each pool, and the messages' median time."""
    target_costs = [ForwardCost.model_validate_json(text) for text in targets]
    draft_costs = [DraftCost.model_validate_json(text) for text in drafters]
    if not (target_costs and draft_costs):
        raise ClusterError("no replica has published its costs yet; expected a target and a drafter that run")
    target = sorted(target_costs, key=_one_token_s)[len(target_costs) // 2]
    draft = sorted(draft_costs, key=_one_token_s)[len(draft_costs) // 2]
    hops = [span.ended_s - span.began_s for span in spans(actors) if span.name in HOPS]
    if not hops:
        return CostModel(target=target, draft=draft)
    return CostModel(target=target, draft=draft, hop_s=max(0.0, median(hops)))


def _one_token_s(cost: ForwardCost | DraftCost) -> float:
    """What replicas of one pool are compared by."""
    return cost.seconds(1, 1)
