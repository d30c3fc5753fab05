"""`slipstream status`: what a running deployment reports, over HTTP and through Ray."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Group
from rich.table import Table

from cluster.audit.audits import OUTCOMES
from serve_app.endpoint_client import ChatEndpoint, Counters
from serve_app.operations.deploying import serve_details
from serve_app.operations.ray_cluster import ClusterError, broadcast, connected, deployed
from serve_app.status.acceptance import acceptance_table, drafters_table, handovers_table, remedies_table
from serve_app.status.scaling import pools_table, told_bounds
from serve_app.status.versions import versions_table
from serve_app.tables import shown, table


async def endpoint_status(url: str) -> Group:
    """Returns health, model, counters and versions of prompts. Raises EndpointError if nothing answers."""
    async with ChatEndpoint.at(url) as endpoint:
        health = await endpoint.health()
        model = await endpoint.model()
        exposition = await endpoint.exposition()
    versions = versions_table(exposition)
    whole = _endpoint_table(url, health, model, Counters.parse(exposition))
    return Group(whole, *([versions] if versions is not None else []))


def ray_status(address: str, application: str) -> Group | str:
    """Returns the deployments of all applications on the cluster, or why there are none.

    For `application`, the tables of its replicas' counters are included.
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
        targets, drafters, routers = (
            broadcast(deployed(pool, application), "inspect") for pool in ("Target", "Drafter", "Router")
        )
        bounds = told_bounds(serve_details()["applications"].get(application, {}))
    except (ClusterError, RayServeException, TimeoutError) as error:
        return f"The replicas of {application} do not say what they have counted: {error}"
    return Group(
        pools_table(targets, drafters, bounds),
        targets_table(targets),
        drafters_table(drafters),
        replicas_table(targets, drafters),
        remedies_table(routers),
        handovers_table(routers),
        acceptance_table(targets, drafters),
        audits_table(routers),
    )


def replicas_table(targets: Sequence[Mapping[str, Any]], drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates counters since replicas began, from what they answer to `inspect`."""
    made = table("Since the replicas began", "what", "value")
    drafting = sum((Counter(one["counts"]) for one in drafters), Counter[str]())
    passes = drafting["passes"] + drafting["passes_ahead"]
    made.add_row("drafting passes ahead of a verdict", _share(drafting["passes_ahead"], passes))
    made.add_row("guess hit rate", _share(drafting["guess_hit"], drafting["guess_hit"] + drafting["guess_miss"]))
    accepted, wasted, step_s, idle_s, rebased, desyncs = (
        sum(one[name] for one in targets)
        for name in ("accepted_tokens", "wasted_tokens", "step_s", "idle_s", "rebased", "desyncs")
    )
    made.add_row("wasted draft tokens", _share(wasted, accepted + wasted))
    made.add_row("late blocks of use", str(rebased))
    dropped = sum((Counter(one["dropped"]) for one in targets), Counter[str]())
    made.add_row("dropped blocks", str(dropped.total()))
    for cause, count in dropped.most_common():
        made.add_row(f"of them {cause}", str(count))
    made.add_row("desyncs", str(desyncs))
    states = sum((Counter(one.get("states", {})) for one in targets), Counter[str]())
    if rows := states["verdict"] + states["apart"]:
        sent = states["verdict_bytes"] + states["apart_bytes"]
        made.add_row("hidden states sent, bytes a token", f"{shown(sent / rows)} ({rows} tokens)")
        made.add_row("of them with verdicts", _share(states["verdict"], rows))
    if "again" in states:
        made.add_row("tokens computed again for hidden states", str(states["again"]))
        made.add_row("drafters too slow for them, sessions", str(states["lost"]))
    made.add_row("target idle", shown(_ratio(idle_s, idle_s + step_s)))
    return made


def targets_table(targets: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates each target replica's attention backend and measured gain of speculation."""
    made = table("Targets", "pid", "attention", "plain tokens/s", "gain by speculation", "speculation")
    for target in targets:
        speculation = target["speculation"]
        is_on = "on" if speculation["on"] else "off"
        reports = dict.fromkeys(_attention(report) for report in target["attention"])  # equal reports once
        measured = shown(speculation["plain_rate"], ".1f"), shown(speculation["gain"])
        made.add_row(str(target["pid"]), "\n".join(reports), *measured, is_on)
    return made


def audits_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates the outcomes of audited requests."""
    made = table("Audits since the routers began", "what", "requests")
    for outcome in OUTCOMES:
        made.add_row(outcome, str(sum(one["audits"][outcome] for one in routers)))
    made.add_row("waiting", str(sum(one["audits_waiting"] for one in routers)))
    widest = max((one["widest_near_tie"] for one in routers), default=None)
    made.add_row("widest near-tie, in logits", shown(widest, ".4g"))
    return made


def _attention(report: Mapping[str, Any]) -> str:
    """Describes the chosen backend and each one that was tried; on a CPU there is no choice."""
    slow = (
        " (SLOW: on a GPU, only where nothing else works)" if report["tried"] and report["chosen"] == "gathered" else ""
    )
    tried = (
        f"{one['name']}: {shown(one['step_ms'])} ms"
        if one["step_ms"] is not None
        else f"{one['name']}: {one['refused']}"
        for one in report["tried"]
    )
    return "\n  ".join([f"{report['chosen']}{slow}", *tried])


def _share(part: int, whole: int) -> str:
    return f"{shown(_ratio(part, whole))} ({part} of {whole})"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _endpoint_table(url: str, health: dict[str, Any], model: str, counters: Counters) -> Table:
    made = table(url, "what", "value")
    tally = counters.tally
    made.add_row("model", model)
    for name, value in health.items():
        made.add_row(name, str(value))
    made.add_row("running requests", str(counters.running_requests))
    made.add_row("committed tokens", str(tally.tokens))
    made.add_row("drafted, accepted", f"{tally.drafted}, {tally.accepted}")
    made.add_row("acceptance rate", shown(tally.acceptance_rate))
    made.add_row("acceptance length", shown(tally.acceptance_length))
    return made


def _application_table(name: str, application: Any) -> Table:
    made = table(f"Ray application {name}: {application.status.value}", "deployment", "status", "replicas", "message")
    for deployment, status in application.deployments.items():
        replicas = ", ".join(f"{count} {state}" for state, count in status.replica_states.items() if count)
        made.add_row(deployment, status.status.value, replicas, status.message)
    return made
