"""`slipstream status`: shows a running deployment's state as terminal tables.

`endpoint_status` reads the HTTP endpoint. `ray_status` reads the replicas' answers to `inspect`. `watch` implements
`slipstream status --watch`, the live page's content in a terminal.

The scaling policy computes the displayed pool sizes from each replica's latest report. Serve's controller, which sets
the sizes, averages reports over seconds.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.audit import OUTCOMES
from cluster.autoscaling import (
    DRAFTER,
    TARGET,
    DraftReport,
    DraftScaling,
    Pool,
    PoolDecision,
    TargetReport,
    TargetScaling,
    decide_drafters,
    decide_targets,
    kind_of,
)
from cluster.routing.drafter_health import GIVEN_UP, RESYNCED
from cluster.routing.session_router import LOST, PLANNED
from serve_app.endpoint_client import ChatEndpoint, Counters
from serve_app.operations.deploying import serve_details
from serve_app.operations.ray_cluster import ClusterError, broadcast, connected, deployed
from serve_app.tables import shown, table

Inspected = Sequence[Mapping[str, Any]]
Bounds = Mapping[str, tuple[int, int]]  # (least, most) replicas by deployment, pools only


def deployed_bounds(details: Mapping[str, Any]) -> Bounds:
    """Reads the pools' bounds from Serve's details of an application.

    Raises ClusterError if it has no target pool or draft pool, because the application has ended.
    """
    pools = {name: one for name, one in details.get("deployments", {}).items() if kind_of(name) in (TARGET, DRAFTER)}
    if missing := sorted({TARGET, DRAFTER} - {kind_of(name) for name in pools}, reverse=True):
        raise ClusterError(f"Serve no longer lists its {' and '.join(missing)}")
    settings = {name: one["deployment_config"]["autoscaling_config"] for name, one in pools.items()}
    return {name: (one["min_replicas"], one["max_replicas"]) for name, one in settings.items()}


def pools_table(replicas: Mapping[str, Inspected], bounds: Bounds) -> Table:
    """Tabulates the pools from replicas' answers to `inspect`, by deployment; targets report the scaling settings."""
    result = table("Pools", "pool", "replicas", "bounds", "needed", "why")
    served: defaultdict[str, list[tuple[Inspected, PoolDecision]]] = defaultdict(list)
    for name, targets in replicas.items():
        if kind_of(name) == TARGET and targets:
            settings = targets[0]["scaling"]
            reports = [TargetReport(**one["report"]) for one in targets]
            decision = decide_targets(Pool(len(targets), *bounds[name]), reports, TargetScaling(**settings[name]), 0.0)
            _add(result, name, bounds[name], targets, decision)
            for pool in settings.keys() - {name}:
                served[pool].append((targets, decision))
    for name, models in served.items():
        drafters = replicas.get(name, [])
        scaling = DraftScaling(**models[0][0][0]["scaling"][name])
        reports = [TargetReport(**one["report"]) for targets, _ in models for one in targets]
        own = [DraftReport(**one["report"]) for one in drafters]
        wanted = sum(decision.desired for _, decision in models)
        drafts = decide_drafters(Pool(len(drafters), *bounds[name]), own, scaling, reports, wanted, 0.0)
        _add(result, name, bounds[name], drafters, drafts)
    return result


def _add(pools: Table, name: str, bounds: tuple[int, int], replicas: Inspected, decision: PoolDecision) -> None:
    pools.add_row(name, str(len(replicas)), f"{bounds[0]} to {bounds[1]}", str(decision.desired), decision.why)


RECOVERIES = (RESYNCED, GIVEN_UP)
POSITIONS = 6  # number of block positions shown


def drafters_table(drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates drafters with their checks at load; warnings remain until the drafter ends."""
    result = table("Drafters", "drafter", "address", "method", "expected", "accepted", "check at load")
    for one in drafters:
        check = one["load_check"]
        shares = shown(check["expected"]), shown(check["reached"])
        version = one.get("draft_version")
        method = one["method"] if version is None else f"{one['method']}, version {version['version']}"
        result.add_row(one["name"], one["address"], method, *shares, _format_result(check))
    return result


def recoveries_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates sessions that drafters reopened, and how often routers gave up drafters without useful blocks."""
    result = table("Remedies for poor blocks", "drafter", *RECOVERIES)
    counts: Counter[tuple[str, str]] = Counter()
    for one in routers:
        counts.update(one["remedies"])
    for drafter in sorted({drafter for drafter, _ in counts}):
        result.add_row(drafter, *(str(counts[drafter, step]) for step in RECOVERIES))
    return result


def handovers_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates sessions that moved from a target or drafter, as planned or after its loss."""
    result = table("Moved sessions", "pool", PLANNED, LOST)
    counts: Counter[tuple[str, str]] = Counter()
    for one in routers:
        counts.update(one["handovers"])
    for pool in ("target", "drafter"):
        result.add_row(pool, str(counts[pool, PLANNED]), str(counts[pool, LOST]))
    return result


def acceptance_table(targets: Sequence[Mapping[str, Any]], drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates acceptance by kind of block and position, given acceptance of all earlier tokens."""
    positions = [str(position) for position in range(1, POSITIONS + 1)]
    result = table("Acceptance by position", "drafter", "method", "context", "prefix", "blocks", *positions)
    methods = {one["name"]: one["method"] for one in drafters}
    sums: dict[tuple[str, int, bool], tuple[Counter[int], Counter[int]]] = {}
    for row in (row for target in targets for row in target["tally"]):
        kind = (row["drafter"], row["context"], row["is_prefix_cached"])
        reached, accepted = sums.setdefault(kind, (Counter(), Counter()))
        reached.update(dict(enumerate(row["reached"])))
        accepted.update(dict(enumerate(row["accepted"])))
    for (drafter, context, is_cached), (reached, accepted) in sorted(sums.items()):
        shares = [shown(accepted[at] / reached[at] if reached[at] else None) for at in range(POSITIONS)]
        octave = f"{context}-{2 * context - 1}"
        prefix = "cached" if is_cached else "computed"
        result.add_row(drafter, methods.get(drafter, "-"), octave, prefix, str(reached[0]), *shares)
    return result


def _format_result(check: Mapping[str, Any]) -> str:
    if check["warning"] is not None:
        return f"far below: {check['warning']}"
    return "as expected" if check["is_over"] else f"{check['tokens']} tokens so far"


FAMILY = "slipstream_prompt_version_"
VERSION = "prompt_version"


def versions_table(exposition: str) -> Table | None:
    """Sums counters over all routers, by prompt version; returns None without prompt versions."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples if family.name.startswith(FAMILY) else ():
            labels = sample.labels
            what = labels.get("kind") or labels.get("until") or family.name.removeprefix(FAMILY)
            sums[labels[VERSION]][what] += sample.value
    if not sums:
        return None
    result = table("Prompt versions", "version", "requests", "acceptance rate", "first token s", "request s", "tokens")
    for version, sum_of in sorted(sums.items()):
        result.add_row(
            version,
            str(int(sum_of["requests"])),
            shown(_ratio(sum_of["accepted"], sum_of["drafted"])),
            shown(_ratio(sum_of["first token"], sum_of["choices"]), ".3f"),
            shown(_ratio(sum_of["end"], sum_of["requests"]), ".3f"),
            f"{int(sum_of['prompt'])} + {int(sum_of['completion'])}",
        )
    return result


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


PERIOD_S = 1.0
BAR_CHARS = 24
State = dict[str, Any]


async def watch(url: str, key: str | None, console: Console) -> None:
    """Shows the state until interrupted. Raises EndpointError if the endpoint does not answer."""
    async with ChatEndpoint.at(url, key) as endpoint:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(watched(url, await endpoint.page_state()), refresh=True)
                await asyncio.sleep(PERIOD_S)


def watched(url: str, state: State) -> Group:
    """Renders one snapshot of the server's state."""
    figures = table(f"{state['model']} at {url}", "now", "")
    figures.add_row("tokens/s", shown(state["tokens_per_s"], ".1f"))
    figures.add_row("target busy", _percent(state["busy"]))
    figures.add_row("draft tokens accepted", _percent(state["accepted"]))
    return Group(figures, _targets(state["targets"]), _drafters(state["drafters"]), _acceptance(state["acceptance"]))


def _targets(targets: Sequence[State]) -> Table:
    result = table("Targets", "replica", "sessions", "queued", "busy", "tokens/s", "cache held", "speculation", "gain")
    for one in targets:
        speculation = "on" if one["is_drafted_for"] else "off"
        rates = _percent(one["busy"]), shown(one["tokens_per_s"], ".1f"), _percent(one["cache"])
        result.add_row(one["name"], str(one["sessions"]), str(one["queued"]), *rates, speculation, shown(one["gain"]))
    return result


def _drafters(drafters: Sequence[State]) -> Table:
    result = table("Drafters", "replica", "sessions", "method", "draft tokens/s", "passes ahead of a verdict")
    for one in drafters:
        rates = shown(one["draft_tokens_per_s"], ".1f"), _percent(one["ahead"])
        result.add_row(one["name"], str(one["sessions"]), one["method"], *rates)
    return result


def _acceptance(chances: Sequence[float]) -> Table:
    result = Table(title="Acceptance by position in a block", title_justify="left", show_header=False)
    for position, chance in enumerate(chances, 1):
        result.add_row(str(position), _percent(chance), Text("█" * round(BAR_CHARS * chance), style="green"))
    return result


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


async def endpoint_status(url: str) -> Group:
    """Returns health by model, counters and prompt versions. Raises EndpointError if the endpoint does not answer."""
    async with ChatEndpoint.at(url) as endpoint:
        health = await endpoint.health()
        exposition = await endpoint.exposition()
    versions = versions_table(exposition)
    whole = _endpoint_table(url, health, Counters.parse(exposition))
    return Group(whole, *([versions] if versions is not None else []))


def ray_status(address: str, application: str) -> Group | str:
    """Returns a table of each application on the cluster, or the reason why there is none.

    For `application`, adds the tables of replica counters.
    """
    try:
        with connected(address):
            applications = serve.status().applications
            counted = [_counted(application)] if application in applications else []
    except ClusterError as error:
        return f"Ray: {error}"
    if not applications:
        return f"Ray: nothing is deployed on the cluster at '{address}'"
    return Group(*(_application_table(name, status) for name, status in applications.items()), *counted)


def _counted(application: str) -> Group | str:
    try:
        bounds = deployed_bounds(serve_details()["applications"].get(application, {}))
        pools = {name: broadcast(deployed(name, application), "inspect") for name in bounds}
        routers = broadcast(deployed("Router", application), "inspect")
    except (ClusterError, RayServeException, TimeoutError) as error:
        return f"The replicas of {application} do not report their counters: {error}"
    targets, drafters = (
        [one for name, replicas in pools.items() if kind_of(name) == kind for one in replicas]
        for kind in (TARGET, DRAFTER)
    )
    return Group(
        pools_table(pools, bounds),
        targets_table(targets),
        drafters_table(drafters),
        replicas_table(targets, drafters),
        recoveries_table(routers),
        handovers_table(routers),
        acceptance_table(targets, drafters),
        audits_table(routers),
    )


def replicas_table(targets: Sequence[Mapping[str, Any]], drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Sums counters since the replicas' start, from their answers to `inspect`."""
    result = table("Since the replicas started", "what", "value")
    drafting = sum((Counter(one["counts"]) for one in drafters), Counter[str]())
    passes = drafting["passes"] + drafting["passes_ahead"]
    result.add_row("drafting passes ahead of a verdict", _share(drafting["passes_ahead"], passes))
    result.add_row("guess hit rate", _share(drafting["guess_hit"], drafting["guess_hit"] + drafting["guess_miss"]))
    accepted, wasted, step_s, idle_s, rebased, desyncs = (
        sum(one[name] for one in targets)
        for name in ("accepted_tokens", "wasted_tokens", "step_s", "idle_s", "rebased", "desyncs")
    )
    result.add_row("wasted draft tokens", _share(wasted, accepted + wasted))
    result.add_row("late blocks used", str(rebased))
    dropped = sum((Counter(one["dropped"]) for one in targets), Counter[str]())
    result.add_row("dropped blocks", str(dropped.total()))
    for cause, count in dropped.most_common():
        result.add_row(f"of them {cause}", str(count))
    result.add_row("desyncs", str(desyncs))
    states = sum((Counter(one.get("states", {})) for one in targets), Counter[str]())
    if rows := states["verdict"] + states["apart"]:
        sent = states["verdict_bytes"] + states["apart_bytes"]
        result.add_row("hidden states sent, bytes per token", f"{shown(sent / rows)} ({rows} tokens)")
        result.add_row("of them with verdicts", _share(states["verdict"], rows))
    if "again" in states:
        result.add_row("tokens recomputed for hidden states", str(states["again"]))
        result.add_row("sessions with drafters too slow for hidden states", str(states["lost"]))
    result.add_row("target idle", shown(_ratio(idle_s, idle_s + step_s)))
    return result


def targets_table(targets: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates each target replica's attention backend, numerics and measured gain from speculation."""
    columns = "pid", "attention", "numerics", "non-speculative tokens/s", "gain from speculation", "speculation"
    result = table("Targets", *columns)
    for target in targets:
        speculation = target["speculation"]
        is_on = "on" if speculation["on"] else "off"
        reports = dict.fromkeys(_attention(report) for report in target["attention"])  # removes duplicates
        measured = shown(speculation["non_speculative_rate"], ".1f"), shown(speculation["gain"])
        result.add_row(str(target["pid"]), "\n".join(reports), "\n".join(target["numerics"]), *measured, is_on)
    return result


def audits_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates the outcomes of audited requests."""
    result = table("Audits since the routers started", "what", "requests")
    for outcome in OUTCOMES:
        result.add_row(outcome, str(sum(one["audits"][outcome] for one in routers)))
    result.add_row("waiting", str(sum(one["audits_waiting"] for one in routers)))
    widest = max((one["widest_near_tie"] for one in routers), default=None)
    result.add_row("widest near-tie, in logits", shown(widest, ".4g"))
    return result


def _attention(report: Mapping[str, Any]) -> str:
    """Describes the chosen backend and all tried backends; on a CPU, none is tried."""
    slow = " (SLOW: no faster backend works on this GPU)" if report["tried"] and report["chosen"] == "gathered" else ""
    tried = (
        f"{one['name']}: {shown(one['step_ms'])} ms"
        if one["step_ms"] is not None
        else f"{one['name']}: {one['refused']}"
        for one in report["tried"]
    )
    return "\n  ".join([f"{report['chosen']}{slow}", *tried])


def _share(part: int, whole: int) -> str:
    return f"{shown(_ratio(part, whole))} ({part} of {whole})"


def _endpoint_table(url: str, health: dict[str, Any], counters: Counters) -> Table:
    result = table(url, "what", "value")
    tally = counters.tally
    for name, value in health.items():
        rows = {f"model {model}": state for model, state in value.items()} if name == "models" else {name: value}
        for what, shown_value in rows.items():
            result.add_row(what, str(shown_value))
    result.add_row("running requests", str(counters.running_requests))
    result.add_row("committed tokens", str(tally.tokens))
    result.add_row("drafted, accepted", f"{tally.drafted}, {tally.accepted}")
    result.add_row("acceptance rate", shown(tally.acceptance_rate))
    result.add_row("acceptance length", shown(tally.acceptance_length))
    return result


def _application_table(name: str, application: Any) -> Table:
    result = table(f"Ray application {name}: {application.status.value}", "deployment", "status", "replicas", "message")
    for deployment, status in application.deployments.items():
        replicas = ", ".join(f"{count} {state}" for state, count in status.replica_states.items() if count)
        result.add_row(deployment, status.status.value, replicas, status.message)
    return result
