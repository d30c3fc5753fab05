"""Pure checks before deployment: each pool's replicas fit the nodes, and exposed endpoints require a key.

The checks only refuse impossible configurations. Ray may still delay a pool while its resources are in use.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import AdminConfig, DraftPool, Replicas, Resources, ServerConfig, SlipstreamConfig, TargetPool
from cluster.errors import ConfigError
from cluster.placement import pools, rank_bundle, replica_resources, resources_key, resources_of
from cluster.trust import is_loopback
from serve_app.serve_manifest import with_default_routers

ROUTER_CPUS = 0.1
A_TARGET = "a target replica"
A_DRAFTER = "a drafter"
A_TRAINER = "a trainer"
A_ROUTER = "a router"


def demand(config: SlipstreamConfig, size: Callable[[Replicas], int]) -> dict[str, float]:
    """Returns the total resources of all processes; `size` picks a size from a pool's bounds."""
    total: Counter[str] = Counter()
    for pool in pools(config).values():
        total.update({name: amount * size(pool.replicas) for name, amount in replica_resources(pool).items()})
    for resources in _trainers(config).values():
        total.update(rank_bundle(resources))
    return {**total, "CPU": total["CPU"] + ROUTER_CPUS * config.server.routers}


def _trainers(config: SlipstreamConfig) -> dict[str, Resources]:
    """Returns the resources of each trainer, by configuration section; only one model uses a pool that learns."""
    return {
        f"{section}.learning.resources": pool.learning.resources
        for section, pool in pools(config).items()
        if isinstance(pool, DraftPool) and pool.learning is not None
    }


def check_resources(config: SlipstreamConfig, offered: Mapping[str, float]) -> None:
    """Raises ConfigError if a local cluster, which cannot grow, lacks the configured resources or labels."""
    fix = "lower these requirements, or set --address to a cluster that meets them"
    own = {f"{name}.{resources_key(pool)}": resources_of(pool) for name, pool in pools(config).items()}
    sections = own | _trainers(config)
    needed = demand(config, lambda replicas: replicas.min)
    if "GPU" in needed:
        needed["GPU"] = gpus_needed(_gpu_shares(config))
    missing = [
        f"{amount:g} {name} (available: {offered.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > offered.get(name, 0)
    ]
    if missing:
        raise ConfigError(f"{' and '.join(sections)} need {', '.join(missing)}; {fix}")
    if any(resources.labels for resources in sections.values()):
        raise ConfigError(f"resources.labels: a local cluster has no labels; {fix}")


def _gpu_shares(config: SlipstreamConfig) -> list[float]:
    """Returns the GPUs of each process, with all pools at their minimum size."""
    shares = [resources.num_gpus for resources in _trainers(config).values()]
    for pool in pools(config).values():
        shares += [resources_of(pool).num_gpus] * (_processes(pool) * pool.replicas.min)
    return shares


def _processes(pool: TargetPool | DraftPool) -> int:
    """Returns the number of a replica's processes that use GPUs."""
    return 1 if isinstance(pool, DraftPool) else pool.tensor_parallel


def gpus_needed(shares: Sequence[float]) -> float:
    """Returns a lower bound on the GPUs for processes with these shares; a share below 1 must fit on one GPU.

    For any smallest share, a GPU holds at most `floor(1 / smallest)` of them, and a larger share counts as
    `floor(share / smallest)`. Such a bound never exceeds the optimal packing.
    """
    whole = [share for share in shares if share >= 1]
    parts = [share for share in shares if 0 < share < 1]
    by_smallest = [
        sum(math.floor(share / smallest + SLACK) for share in parts) / math.floor(1 / smallest + SLACK)
        for smallest in set(parts)
    ]
    return sum(whole) + max(sum(parts), *by_smallest, 0.0)


LOOPBACK = "127.0.0.1"


def check_keys(server: ServerConfig) -> None:
    """Raises ConfigError if an address is reachable from other machines, without keys or `server.insecure`."""
    for name, host in (("server.host", server.host), ("server.admin.host", server.admin.host)):
        if not is_loopback(host) and not is_guarded(server):
            raise ConfigError(f"{name} is {host}, reachable from other machines, and {missing_keys()}")


def on_loopback(config: SlipstreamConfig) -> SlipstreamConfig:
    """Returns the configuration on loopback and without keys, for measurements on this machine."""
    alone = {"host": LOOPBACK, "keys": {}, "admin": AdminConfig()}
    return config.model_copy(update={"server": config.server.model_copy(update=alone)})


def is_guarded(server: ServerConfig) -> bool:
    """Returns whether clients need a key, or the configuration explicitly waives it."""
    return bool(server.keys) or server.insecure


def missing_keys() -> str:
    """Returns the end of an error message about missing API keys, with the fix."""
    return (
        "server.keys is empty, so anybody would be served; set keys (`slipstream key` makes one) or server.insecure:"
        " true"
    )


SLACK = 1e-6  # tolerance: Ray rounds resources to ten-thousandths


@dataclass(frozen=True, slots=True)
class Node:
    """Node with its total resources, used or free."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplicaNeed:
    """Resources of one replica, all on one node."""

    pool: str
    section: str  # configuration section of the resources
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    replicas: int  # number of replicas that must fit together
    processes: int = 1  # per replica; they share its GPUs equally

    @property
    def gpu_shares(self) -> list[float]:
        """GPUs needed by each process of a replica."""
        return [self.resources.get("GPU", 0.0) / self.processes] * self.processes

    def fits(self, node: Node) -> bool:
        """Returns whether the node can hold one replica."""
        return matches_selector(node.labels, self.labels) and self.copies_on(node) > 0

    def copies_on(self, node: Node) -> int:
        """Returns the number of replicas that fit on the node, regardless of labels."""
        return copies_that_fit(node.resources, self.resources, self.processes)


def needs(config: SlipstreamConfig) -> tuple[ReplicaNeed, ...]:
    """Returns the needs of targets, drafters, trainers and routers, in this order."""
    return (
        *(_pool_need(section, pool) for section, pool in pools(config).items()),
        *(
            ReplicaNeed(A_TRAINER, section, rank_bundle(resources), resources.labels, 1)
            for section, resources in _trainers(config).items()
        ),
        ReplicaNeed(A_ROUTER, "server.routers", {"CPU": ROUTER_CPUS}, {}, config.server.routers),
    )


def _pool_need(section: str, pool: TargetPool | DraftPool) -> ReplicaNeed:
    """Returns the need of a pool; even a pool that may be empty needs room for its first replica."""
    what = A_DRAFTER if isinstance(pool, DraftPool) else A_TARGET
    section = f"{section}.{resources_key(pool)}"
    least = max(pool.replicas.min, 1)
    return ReplicaNeed(what, section, replica_resources(pool), resources_of(pool).labels, least, _processes(pool))


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether labels satisfy a Ray label selector: `value`, `!value`, `in(a,b)` or `!in(a,b)` per key."""
    return all(_satisfies(labels.get(key), value) for key, value in selector.items())


def _satisfies(value: str | None, requirement: str) -> bool:
    if requirement.startswith("!"):
        return not _satisfies(value, requirement[1:])
    if requirement.startswith("in(") and requirement.endswith(")"):
        return value in [one.strip() for one in requirement[3:-1].split(",")]
    return value == requirement


def copies_that_fit(offered: Mapping[str, float], needed: Mapping[str, float], processes: int = 1) -> int:
    """Returns how many replicas that need `needed` fit into `offered`.

    A replica's `processes` share its GPUs equally. A process that needs less than one GPU cannot span two.
    """
    times = [(offered.get(name, 0.0) + SLACK) / amount for name, amount in needed.items() if amount > 0]
    share = needed.get("GPU", 0.0) / processes
    if 0 < share < 1:
        gpus = offered.get("GPU", 0.0)
        whole = math.floor(gpus + SLACK)
        slots = whole * math.floor(1 / share + SLACK) + math.floor((gpus - whole + SLACK) / share)
        times.append(slots / processes)
    return math.floor(min(times)) if times else 1


def unmet_needs(config: SlipstreamConfig, nodes: Sequence[Node]) -> list[str]:
    """Returns one line per pool whose minimum size does not fit: the missing and existing resources, and the fix.

    Counts the routers that `deploy` starts by default on a cluster of this size.
    """
    cpus = sum(node.resources.get("CPU", 0.0) for node in nodes)
    replica_needs = needs(with_default_routers(config, cpus))
    if alone := [line for need in replica_needs if (line := _unmet_need(need, nodes)) is not None]:
        return alone
    for labels in ({}, *(need.labels for need in replica_needs)):
        sharing = [need for need in replica_needs if labels in ({}, need.labels)]
        if lines := _unmet_total(sharing, [node for node in nodes if matches_selector(node.labels, labels)], labels):
            return lines
    return []


def check_fit(config: SlipstreamConfig, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the nodes cannot hold all pools."""
    lines = unmet_needs(config, nodes)
    if lines:
        hint = "nothing was changed; if the cluster adds nodes itself, `slipstream up --autoscaled` waits for them"
        raise ConfigError("\n  ".join(["the cluster cannot hold this configuration", *lines, hint]))


def _unmet_need(need: ReplicaNeed, nodes: Sequence[Node]) -> str | None:
    labelled = [node for node in nodes if matches_selector(node.labels, need.labels)]
    if not labelled:
        return (
            f"{need.section}.labels: {need.pool} needs a node with {_labels(need.labels)}, but none of"
            f" {len(nodes)} nodes has them; existing labels: {_all_labels(nodes)}; start a node with the labels"
            " (`ray start --labels`), or change the required labels"
        )
    slots = sum(need.copies_on(node) for node in labelled)
    if slots >= need.replicas:
        return None
    label_clause = f" with {_labels(need.labels)}" if need.labels else ""
    if slots:
        return (
            f"{need.section}: {need.replicas} times {need.pool} must always run, but {_count_clause(nodes)}"
            f" room for {slots}, with {_format_resources(need.resources)} each{label_clause}; add nodes, or lower"
            " replicas.min"
        )
    needed = dict(need.resources)
    if "GPU" in needed and need.processes > 1:
        needed["GPU"] = gpus_needed(need.gpu_shares)
    most = {name: max(node.resources.get(name, 0.0) for node in labelled) for name in needed}
    missing = {name: amount for name, amount in needed.items() if most[name] + SLACK < amount}
    problem = _missing_clause(missing or needed, most, bool(missing))
    return f"{need.section}: {need.pool} needs {_format_resources(needed)} on one node{label_clause}, but {problem}"


def _missing_clause(missing: Mapping[str, float], most: Mapping[str, float], is_alone: bool) -> str:
    if not is_alone:
        return "no node has all of them; add a larger node, or reserve less"
    has = ", ".join(f"{most[name]:g} {name}" for name in missing)
    return f"no node has more than {has}; add a larger node, or reserve less"


def _unmet_total(replica_needs: Iterable[ReplicaNeed], nodes: Sequence[Node], labels: Mapping[str, str]) -> list[str]:
    """Returns a line if the pools fit the nodes with `labels` individually but not in total, else none."""
    total: Counter[str] = Counter()
    shares: list[float] = []
    for need in replica_needs:
        for name, amount in need.resources.items():
            total[name] += amount * need.replicas  # type: ignore[assignment]  # a counter of fractions
        shares += need.gpu_shares * need.replicas
    if "GPU" in total:
        total["GPU"] = gpus_needed(shares)  # type: ignore[assignment]
    offered = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in total}
    missing = [name for name, amount in total.items() if amount > offered[name] + SLACK]
    if not missing:
        return []
    needed = _format_resources({name: total[name] for name in missing})
    available = _format_resources({name: offered[name] for name in missing})
    label_clause = f" on nodes with {_labels(labels)}" if labels else ""
    return [
        f"the pools{label_clause} at their minimum size need {needed} together, but"
        f" {_count_clause(nodes)} {available}; add nodes or reserve less"
    ]


def _count_clause(nodes: Sequence[Node]) -> str:
    return "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"


def _format_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items())


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _all_labels(nodes: Iterable[Node]) -> str:
    """Returns the labels that distinguish nodes, except Ray's node id."""
    labels = {f"{key}={value}" for node in nodes for key, value in node.labels.items() if key != "ray.io/node-id"}
    return ", ".join(sorted(labels)) or "none"
