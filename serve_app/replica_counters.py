"""Counters of targets, drafters and routers by cause, exported through Ray's metrics.

A router's `/metrics` only covers its own requests (`api/metrics.py`). Ray exports these counters at the metrics port of
each node, with the prefix `ray_` and the labels `deployment` and `replica`.

Share of verdicts that matched the block drafted ahead:

    sum(rate(ray_slipstream_guesses_total{cause="hit"}[5m])) / sum(rate(ray_slipstream_guesses_total[5m]))

Share of draft tokens wasted:

    sum(rate(ray_slipstream_received_draft_tokens_total{cause="wasted"}[5m]))
      / sum(rate(ray_slipstream_received_draft_tokens_total[5m]))

Idle share of a target's time with sessions, by replica:

    sum by (replica) (rate(ray_slipstream_target_seconds_total{cause="idle"}[5m]))
      / sum by (replica) (rate(ray_slipstream_target_seconds_total[5m]))

Acceptance of first draft tokens, by context length and prefix caching:

    sum by (context, prefix) (rate(ray_slipstream_draft_positions_total{position="1", outcome="accepted"}[5m]))
      / sum by (context, prefix) (rate(ray_slipstream_draft_positions_total{position="1"}[5m]))
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from actors.attention.select_backend import AttentionReport
from actors.drafter import Drafter
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.draft_quality import AcceptanceStats

Counts = Mapping[str, Mapping[str, float] | Mapping[tuple[str, ...], float]]
"""Counter values by family name, then by cause or, for families in LABELS, by all labels."""

CAUSE_LABEL = ("cause",)
LABELS = {"slipstream_draft_positions": ("drafter", "method", "position", "context", "prefix", "outcome")}

HELP = {
    "slipstream_dropped_blocks": "Received blocks that were not verified, by cause",
    "slipstream_received_draft_tokens": "Received draft tokens, accepted or wasted",
    "slipstream_draft_positions": "Positions of verified blocks, up to the first rejected token",
    "slipstream_target_seconds": "Time with sessions, in a step or idle",
    "slipstream_target_events": "Used late blocks, desynchronized drafters, preempted sessions, and"
    " sessions whose drafter lost hidden states",
    "slipstream_nonfinite_logits": "Sessions that a target ended because of NaN or infinite logits",
    "slipstream_state_rows": "Rows of hidden states (one per token) sent to drafters with verdicts or separately, and"
    " tokens recomputed for their states",
    "slipstream_guesses": "Verdicts after drafting ahead, by whether the block matched (hit)",
    "slipstream_drafting_passes": "Drafting passes, requested (asked) or ahead of verdicts",
    "slipstream_drafter_events": "Other events of a drafter",
    "slipstream_draft_versions": "Learned draft versions at a drafter: swapped, refused, rolled back after lower"
    " acceptance; and failed reads of the folder",
    "slipstream_audits": "Requests selected for audits, by outcome",
    "slipstream_examples": "Sessions offered as examples: kept, near-duplicate, dropped under load, or failed to write",
    "slipstream_example_states": "Sessions whose hidden states a drafter kept as examples, dropped, or failed to write",
    "slipstream_routed_sessions": "Sessions assigned to targets by an expected cached prefix, or by load alone",
    "slipstream_refused_messages": "Malformed messages, by kind",
    "slipstream_refused_peers": "Streams and messages refused for their sender, by cause",
    "slipstream_attention_fallbacks": "Ranks on a GPU that use the named slow attention backend",
}


def attention_counts(reports: Sequence[AttentionReport]) -> Counts:
    """Counts a replica's ranks on the slow attention fallback, by backend."""
    slow = Counter(report.chosen for report in reports if report.is_fallback)
    return {"slipstream_attention_fallbacks": slow}


def target_counts(target: TargetReplica, method: str) -> Counts:
    """Returns a target replica's counts; `method` is the drafting method."""
    scheduler = target.scheduler
    return {
        "slipstream_dropped_blocks": dict(scheduler.counts.dropped),
        "slipstream_received_draft_tokens": {
            "accepted": scheduler.counts.accepted_tokens,
            "wasted": scheduler.counts.wasted_tokens,
        },
        "slipstream_draft_positions": _positions(scheduler.draft_quality.acceptance, method),
        "slipstream_target_seconds": {"step": scheduler.counts.step_s, "idle": scheduler.counts.idle_s},
        "slipstream_target_events": {
            "rebased": scheduler.counts.rebased,
            "desync": scheduler.draft_quality.desyncs,
            "preempted": scheduler.admission.preempted,
            "states_lost": scheduler.feeds.counts.get("lost", 0),
        },
        "slipstream_nonfinite_logits": {"ended": scheduler.counts.nonfinite},
        "slipstream_state_rows": {way: scheduler.feeds.counts.get(way, 0) for way in ("verdict", "apart", "again")},
        "slipstream_refused_messages": dict(target.refused),
        "slipstream_refused_peers": dict(target.scheduler.refusals.counts),
    }


def _positions(tally: AcceptanceStats, method: str) -> dict[tuple[str, ...], float]:
    """Returns counts of block positions by labels, for positions after accepted tokens only."""
    counts_by_label: dict[tuple[str, ...], float] = {}
    for drafter, kinds in tally.counts.items():
        for kind, counts in kinds.items():
            prefix = "cached" if kind.is_prefix_cached else "computed"
            for at, (reached, accepted) in enumerate(zip(counts.reached, counts.accepted, strict=True), 1):
                labels = (drafter, method, str(at), str(kind.context), prefix)
                counts_by_label[*labels, "accepted"] = accepted
                counts_by_label[*labels, "rejected"] = reached - accepted
    return counts_by_label


def drafter_counts(drafter: Drafter) -> Counts:
    """Returns a drafter's counts."""
    events = dict(drafter.scheduler.counts)
    return {
        "slipstream_guesses": {"hit": events.pop("guess_hit", 0), "miss": events.pop("guess_miss", 0)},
        "slipstream_drafting_passes": {"asked": events.pop("passes", 0), "ahead": events.pop("passes_ahead", 0)},
        "slipstream_drafter_events": events,
        "slipstream_refused_messages": dict(drafter.refused),
        "slipstream_refused_peers": dict(drafter.scheduler.refusals.counts),
    }


def version_counts(counts: Mapping[str, int]) -> Counts:
    """Returns a drafter's counts of learned-version events."""
    return {"slipstream_draft_versions": counts}


def audit_counts(audits: Audits) -> Counts:
    """Returns a router's audits by outcome."""
    return {"slipstream_audits": dict(audits.counts)}


def example_counts(examples: Mapping[str, int]) -> Counts:
    """Returns a router's counts of sessions offered as examples."""
    return {"slipstream_examples": dict(examples)}


def kept_states_counts(sessions: Mapping[str, int]) -> Counts:
    """Returns a drafter's counts of sessions whose hidden states it offered."""
    return {"slipstream_example_states": dict(sessions)}


def routed_counts(routed: Mapping[str, int]) -> Counts:
    """Returns a router's assignments to targets, by reason."""
    return {"slipstream_routed_sessions": routed}


def counted_families(counts: Counts) -> Iterator[Metric]:
    """Yields the counts as Prometheus families."""
    for name, causes in counts.items():
        labels = LABELS.get(name, CAUSE_LABEL)
        family = CounterMetricFamily(name, HELP[name], labels=labels)
        for cause, value in causes.items():
            family.add_metric((cause,) if isinstance(cause, str) else cause, value)
        yield family
