"""Families of a process's current state, and vLLM's engine counters, built at collection time.

Share of time with speculation on, by replica:

    avg_over_time(ray_slipstream_speculation_on[1h])

Time from the previous verdict to the arrival of a block at the target:

    sum(rate(ray_slipstream_block_delay_seconds_total[5m])) / sum(rate(ray_slipstream_timed_blocks_total[5m]))
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from actors.learning.trainer import TrainerStatus
from cluster.verification.scheduler import TargetActivity
from serve_app.publishing.aggregate_metrics import MODEL, PREFIX
from serve_app.router import RouterActivity


def target_levels(activity: TargetActivity, preempted: int, model: str) -> Iterator[Metric]:
    """Yields a target replica's families."""
    yield _gauge("slipstream_speculation_on", "Whether drafts are requested", float(activity.speculates))
    yield _gauge("slipstream_speculation_gain", "Throughput relative to non-speculative decoding", activity.gain)
    non_speculative = "slipstream_non_speculative_tokens_per_second"
    yield _gauge(non_speculative, "Measured throughput without speculation", activity.non_speculative_rate)
    earlier = f"Earlier name of {non_speculative}"
    yield _gauge("slipstream_plain_tokens_per_second", earlier, activity.non_speculative_rate)
    chosen = {str(tokens): count for tokens, count in sorted(activity.chosen.items())}
    yield _counter("slipstream_chosen_lengths", "Verdicts, by the draft length requested next", chosen)
    yield _total("slipstream_timed_blocks", "Requested blocks received", activity.blocks_timed)
    delays = "Total time from a verdict to the arrival of the next block"
    yield _total("slipstream_block_delay_seconds", delays, activity.block_delay_s)
    of_model = {MODEL: model}
    yield _gauge(f"{PREFIX}num_requests_running", "Sessions in the cache", activity.running, of_model)
    yield _gauge(f"{PREFIX}num_requests_waiting", "Sessions waiting to run", activity.queued, of_model)
    yield _gauge(f"{PREFIX}kv_cache_usage_perc", "Share of cache pages held by sessions", activity.cache, of_model)
    yield _total(f"{PREFIX}prefix_cache_queries", "Tokens looked up in the cache", activity.prefix_tokens, of_model)
    yield _total(f"{PREFIX}prefix_cache_hits", "Tokens found in the cache", activity.prefix_hits, of_model)
    yield _total(f"{PREFIX}num_preemptions", "Sessions preempted by older sessions", preempted, of_model)


def drafter_levels(sessions: Mapping[str, float], pass_s: Mapping[str, float]) -> Iterator[Metric]:
    """Yields a drafter's families."""
    yield _gauge("slipstream_drafter_sessions", "Sessions at the drafter", sessions["sessions"])
    yield _counter("slipstream_drafting_seconds", "Drafting time, requested or ahead of verdicts", pass_s, "cause")


def version_levels(summary: Mapping[str, Any]) -> Iterator[Metric]:
    """Yields the additional families of a drafter whose draft learns."""
    yield _gauge(
        "slipstream_draft_version", "Version of the learned draft in use; 0: the configured draft", summary["version"]
    )
    if (acceptance := summary["acceptance"]) is not None:
        text = "Acceptance of this version's draft tokens, given acceptance of all earlier tokens in the block"
        yield _gauge("slipstream_draft_version_acceptance", text, acceptance)


def trainer_levels(status: TrainerStatus) -> Iterator[Metric]:
    """Yields the trainer's families."""
    yield _gauge("slipstream_learning_examples", "Examples in the store", float(status.examples))
    yield _gauge("slipstream_learning_new_examples", "Examples since the last training run", float(status.new_examples))
    yield _gauge(
        "slipstream_training", "Whether training is in progress", float(status.phase in ("training", "evaluating"))
    )
    yield _total("slipstream_training_seconds", "Time spent in training runs", status.training_s)
    yield _counter("slipstream_trainings", "Training runs by outcome", dict(status.counts), "outcome")
    for name, figures in (("before", status.before), ("after", status.after)):
        if figures is not None:
            labels = {"draft": name}
            yield _gauge("slipstream_learning_agreement", "Agreement on held-out examples", figures.agreement, labels)


def router_levels(activity: RouterActivity, model: str) -> Iterator[Metric]:
    """Yields a router's families, in addition to its measurements of requests."""
    yield _gauge(f"{PREFIX}num_requests_waiting", "Sessions waiting to run", activity.seeking, {MODEL: model})
    text = "Whether a drafter gets no new sessions (breaker open, full, or probe pending)"
    breakers = GaugeMetricFamily("slipstream_breaker_open", text, labels=("drafter",))
    for drafter, is_unavailable in activity.breakers.items():
        breakers.add_metric((drafter,), float(is_unavailable))
    yield breakers


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=tuple(labels or {}))
    metric.add_metric(tuple((labels or {}).values()), value)
    return metric


def _total(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    metric = CounterMetricFamily(name, text, labels=tuple(labels or {}))
    metric.add_metric(tuple((labels or {}).values()), value)
    return metric


def _counter(name: str, text: str, values: Mapping[str, float], label: str = "tokens") -> Metric:
    metric = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        metric.add_metric((key,), value)
    return metric
