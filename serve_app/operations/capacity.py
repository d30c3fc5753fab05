"""What a config needs of Ray against what a machine offers. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping

from cluster.config import Replicas, SlipstreamConfig
from cluster.errors import ConfigError
from cluster.placement import rank_bundle, target_group_options

ROUTER_CPUS = 0.1


def demand(config: SlipstreamConfig, size: Callable[[Replicas], int]) -> dict[str, float]:
    """What Ray must offer for the pools at the size that `size` picks from their bounds."""
    target = config.target
    draft = config.draft
    total: Counter[str] = Counter()
    bundles = [(bundle, target.replicas) for bundle in target_group_options(target)["placement_group_bundles"]]
    for bundle, replicas in [*bundles, (rank_bundle(draft.resources), draft.replicas)]:
        total.update({name: amount * size(replicas) for name, amount in bundle.items()})
    return {**total, "CPU": total["CPU"] + ROUTER_CPUS * config.server.routers}


def check_resources(config: SlipstreamConfig, offered: Mapping[str, float]) -> None:
    """Raises ConfigError when this machine, a cluster that cannot grow, does not offer what the pools need."""
    elsewhere = "ask for less, or give the --address of a cluster that has it"
    needed = demand(config, lambda replicas: replicas.min)
    missing = [
        f"{amount:g} {name} where there is {offered.get(name, 0):g}"
        for name, amount in needed.items()
        if amount > offered.get(name, 0)
    ]
    if missing:
        raise ConfigError(f"target.resources_per_rank and draft.resources need {', '.join(missing)}; {elsewhere}")
    if config.target.resources_per_rank.labels or config.draft.resources.labels:
        raise ConfigError(f"resources.labels: a local cluster has no labels; {elsewhere}")
