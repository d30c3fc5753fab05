"""Checks before deployment: whether nodes can hold each pool's replicas, and whether an exposed endpoint has a key.
Pure.

The checks refuse only what cannot work. A pool that passes may still find no room in Ray while others use the nodes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import AdminConfig, Replicas, Resources, ServerConfig, SlipstreamConfig
from cluster.errors import ConfigError
from cluster.placement import rank_bundle, target_group_options
from cluster.trust import is_loopback

ROUTER_CPUS = 0.1


def demand(config: SlipstreamConfig, size: Callable[[Replicas], int]) -> dict[str, float]:
    """Returns the resources that the pools need in total, at the sizes that `size` picks from their bounds."""
    target = config.target
    draft = config.draft
    total: Counter[str] = Counter()
    bundles = [(bundle, target.replicas) for bundle in target_group_options(target)["placement_group_bundles"]]
    for bundle, replicas in [*bundles, (rank_bundle(draft.resources), draft.replicas)]:
        total.update({name: amount * size(replicas) for name, amount in bundle.items()})
    return {**total, "CPU": total["CPU"] + ROUTER_CPUS * config.server.routers}


def check_resources(config: SlipstreamConfig, offered: Mapping[str, float]) -> None:
    """Raises ConfigError if a local cluster, which cannot grow, lacks resources or labels that the pools need."""
    elsewhere = "reserve less, or give the --address of a cluster that has it"
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


LOOPBACK = "127.0.0.1"


def check_keys(server: ServerConfig) -> None:
    """Raises ConfigError if others can reach an address, without a key or `server.insecure`."""
    for name, host in (("server.host", server.host), ("server.admin.host", server.admin.host)):
        if not is_loopback(host) and not is_guarded(server):
            raise ConfigError(f"{name} is {host}, which others can reach, and {missing_keys()}")


def for_this_machine(config: SlipstreamConfig) -> SlipstreamConfig:
    """Returns the configuration on loopback and without keys, to measure a server on this machine."""
    alone = {"host": LOOPBACK, "keys": {}, "admin": AdminConfig()}
    return config.model_copy(update={"server": config.server.model_copy(update=alone)})


def is_guarded(server: ServerConfig) -> bool:
    """Returns whether clients need a key, or the configuration states that they need none."""
    return bool(server.keys) or server.insecure


def missing_keys() -> str:
    """Returns the end of an error message: which key is missing, and how to fix it."""
    return (
        "server.keys is empty, so anybody would be served; set keys (`slipstream key` makes one) or server.insecure:"
        " true"
    )


SLACK = 1e-6  # tolerance: Ray rounds resources to ten-thousandths


@dataclass(frozen=True, slots=True)
class Node:
    """A node with its total resources, whether in use or not."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplicaNeed:
    """Resources that one replica needs, all on one node."""

    pool: str
    section: str  # configuration key to change if the replica does not fit
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    replicas: int  # number of replicas that must fit at the same time

    def fits(self, node: Node) -> bool:
        """Returns whether the node could hold one such replica."""
        return carries(node.labels, self.labels) and room(node.resources, self.resources) > 0


def needs(config: SlipstreamConfig) -> tuple[ReplicaNeed, ...]:
    """Returns what targets, drafters and routers need."""
    target = config.target
    draft = config.draft
    group: Counter[str] = Counter()
    for bundle in target_group_options(target)["placement_group_bundles"]:
        group.update(bundle)
    return (
        _pool_need("a target replica", "target.resources_per_rank", group, target.resources_per_rank, target.replicas),
        _pool_need("a drafter", "draft.resources", rank_bundle(draft.resources), draft.resources, draft.replicas),
        ReplicaNeed("a router", "server.routers", {"CPU": ROUTER_CPUS}, {}, config.server.routers),
    )


def _pool_need(
    pool: str, section: str, resources: Mapping[str, float], options: Resources, replicas: Replicas
) -> ReplicaNeed:
    """Returns what a pool needs; a pool that may be empty still needs room for its first replica."""
    return ReplicaNeed(pool, section, dict(resources), options.labels, max(replicas.min, 1))


def carries(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether labels satisfy a Ray label selector: `value`, `!value`, `in(a,b)` or `!in(a,b)` per key."""
    return all(_satisfies(labels.get(key), value) for key, value in selector.items())


def _satisfies(value: str | None, requirement: str) -> bool:
    if requirement.startswith("!"):
        return not _satisfies(value, requirement[1:])
    if requirement.startswith("in(") and requirement.endswith(")"):
        return value in [one.strip() for one in requirement[3:-1].split(",")]
    return value == requirement


def room(offered: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Returns how many times `needed` fits into `offered`."""
    times = [(offered.get(name, 0.0) + SLACK) / amount for name, amount in needed.items() if amount > 0]
    return math.floor(min(times)) if times else 1


def misfits(config: SlipstreamConfig, nodes: Sequence[Node]) -> list[str]:
    """Returns one line per pool whose minimum size does not fit: what is missing, what exists, how to fix it."""
    replica_needs = needs(config)
    alone = [line for need in replica_needs if (line := _misfit(need, nodes)) is not None]
    return alone or _too_much_together(replica_needs, nodes)


def check_fit(config: SlipstreamConfig, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the nodes cannot hold some pool."""
    lines = misfits(config, nodes)
    if lines:
        hint = "nothing was changed; where the cluster adds such nodes by itself, `slipstream up --autoscaled` waits"
        raise ConfigError("\n  ".join(["the cluster cannot hold this configuration", *lines, hint]))


def _misfit(need: ReplicaNeed, nodes: Sequence[Node]) -> str | None:
    labelled = [node for node in nodes if carries(node.labels, need.labels)]
    if not labelled:
        return (
            f"{need.section}.labels: {need.pool} needs a node with {_labels(need.labels)}, but of"
            f" {len(nodes)} nodes none has; the labels there are: {_all_labels(nodes)}; start a node with them"
            " (`ray start --labels`), or change the required labels"
        )
    slots = sum(room(node.resources, need.resources) for node in labelled)
    if slots >= need.replicas:
        return None
    among = f" with {_labels(need.labels)}" if need.labels else ""
    if slots:
        return (
            f"{need.section}: {need.replicas} times {need.pool} must always run, but {_have(nodes)}"
            f" room for {slots} of {_amounts(need.resources)} each{among}; add nodes, or lower replicas.min"
        )
    most = {name: max(node.resources.get(name, 0.0) for node in labelled) for name in need.resources}
    missing = {name: amount for name, amount in need.resources.items() if most[name] + SLACK < amount}
    what = _lacking(missing or need.resources, most, bool(missing))
    return f"{need.section}: {need.pool} needs {_amounts(need.resources)} on one node{among}, but {what}"


def _lacking(missing: Mapping[str, float], most: Mapping[str, float], is_alone: bool) -> str:
    if not is_alone:
        return "no node has all of it; add a node that has it, or reserve less"
    has = ", ".join(f"{most[name]:g} {name}" for name in missing)
    return f"no node has more than {has}; add a node that has it, or reserve less"


def _too_much_together(replica_needs: Iterable[ReplicaNeed], nodes: Sequence[Node]) -> list[str]:
    """Returns a line if all pools together do not fit although each pool alone does, else nothing."""
    total: Counter[str] = Counter()
    for need in replica_needs:
        for name, amount in need.resources.items():
            total[name] += amount * need.replicas  # type: ignore[assignment]  # a counter of fractions
    offered = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in total}
    missing = [name for name, amount in total.items() if amount > offered[name] + SLACK]
    if not missing:
        return []
    needed = _amounts({name: total[name] for name in missing})
    there = _amounts({name: offered[name] for name in missing})
    return [
        f"the pools at their minimum size need {needed} together, but {_have(nodes)} {there}; add nodes or reserve less"
    ]


def _have(nodes: Sequence[Node]) -> str:
    return "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items())


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _all_labels(nodes: Iterable[Node]) -> str:
    """Returns the labels that distinguish nodes, except Ray's node id."""
    labels = {f"{key}={value}" for node in nodes for key, value in node.labels.items() if key != "ray.io/node-id"}
    return ", ".join(sorted(labels)) or "none"
