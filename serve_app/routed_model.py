"""Router, text handling and state of one served model, in a router process."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from ray.serve.handle import DeploymentHandle

from actors.learning.examples import ExampleStore, ExampleWriter
from actors.models.checkpoint import checkpoint_fingerprint, local_folder, vocabulary, vocabulary_fingerprint
from actors.net.credentials import credentials_of
from actors.tracing import ServiceTracing
from cluster.audit import Audits
from cluster.config import ServedModel
from cluster.routing.ray_membership import ServeMembership
from cluster.routing.session_router import PrefixOptions
from cluster.telemetry import Timeline
from cluster.trust import PeerRole
from protos.messages import Identity
from serve_app.api.draft_prompt import DraftPrompts
from serve_app.api.metrics import Metrics
from serve_app.api.routes import ModelService
from serve_app.api.template_process import TemplateProcess
from serve_app.api.text import TextCodec
from serve_app.api.validation import NO_DEFAULTS, load_defaults
from serve_app.audit_alarm import AuditAlarm
from serve_app.publishing.aggregate_metrics import with_labels
from serve_app.publishing.gauges import router_levels
from serve_app.replica_counters import audit_counts, counted_families, example_counts, routed_counts
from serve_app.router import Router, RouterLimits
from serve_app.startup import with_start_timeout

MAX_PREFIX_ADVANTAGE = 0.25  # maximum extra load outweighed by a cached prefix, as a share of a target's slots


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """One served model in a router process."""

    name: str
    router: Router
    service: ModelService
    examples: Mapping[str, int]  # counts of sessions offered as examples

    def metrics(self) -> dict[str, Metrics]:
        """Returns new metrics of requests to this model, with the router's counts, and to each adapter, by name."""
        sessions = self.router.sessions
        metrics = {name: Metrics(model=name) for name in self.service.config.target.adapters}
        metrics[self.name] = Metrics(
            recoveries=lambda: dict(sessions.recoveries), handovers=lambda: sessions.handovers, model=self.name
        )
        return metrics

    def families(self) -> Iterator[Metric]:
        """Yields the router's families, apart from its requests."""
        counts = {**audit_counts(self.router.audits), **routed_counts(self.router.sessions.routed)}
        families = chain(
            counted_families({**counts, **example_counts(self.examples)}),
            router_levels(self.router.activity, self.name),
        )
        return with_labels(families, {"model": self.name})

    def inspect(self) -> dict[str, Any]:
        """Returns the router's state and counters; `summed` adds those of several models."""
        router = self.router
        return {
            "idle": router.is_idle,
            "ready": router.is_ready,
            "refusals": router.refusals,
            "remedies": dict(router.sessions.recoveries),
            "routed": dict(router.sessions.routed),
            "handovers": dict(router.sessions.handovers),
            "audits": dict(router.audits.counts),
            "audits_waiting": router.audits.waiting,
            "widest_near_tie": router.audits.widest_near_tie,
            "examples": dict(self.examples),
        }


def summed(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the answers of `RoutedModel.inspect`; a router is ready once each model reaches a target."""
    counts = ("remedies", "routed", "handovers", "audits", "examples")
    return {
        "idle": all(one["idle"] for one in states),
        "ready": all(one["ready"] for one in states),
        "refusals": {address: why for one in states for address, why in one["refusals"].items()},
        **{name: _sums(one[name] for one in states) for name in counts},
        "audits_waiting": sum(one["audits_waiting"] for one in states),
        "widest_near_tie": max(one["widest_near_tie"] for one in states),
    }


def _sums(counts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    total = Counter[Any]()
    for one in counts:
        total.update(one)  # unlike a sum of counters, keeps zeros
    return dict(total)


async def fetch_tokenizers(names: Iterable[str], limit_s: float) -> dict[str, Path]:
    """Returns the folders of these checkpoints, without weights; downloads missing files.

    Raises EngineError after `limit_s`.
    """
    fetching = asyncio.to_thread(lambda: {name: local_folder(name, with_weights=False) for name in names})
    return await with_start_timeout(limit_s, "target.start_timeout_s", fetching)


def start_model(
    served: ServedModel,
    folder: Path,
    pools: Mapping[str, DeploymentHandle[Any]],
    *,
    ending: AsyncExitStack,
    tracing: ServiceTracing,
    timeline: Timeline,
    render: TemplateProcess,
    alarm: AuditAlarm,
    draft_template: Path | None,
) -> RoutedModel:
    """Creates the router of one model and loads its tokenizer from `folder`; registers their shutdown on `ending`.

    `draft_template` is the folder of the chat template for drafts, if they have their own.
    """
    config = served.config
    identity = Identity(vocabulary_fingerprint(vocabulary(folder)), checkpoint_fingerprint(folder))
    pool = config.target
    prefixes = PrefixOptions(pool.cache_per_rank.page_size, MAX_PREFIX_ADVANTAGE * pool.max_sessions)
    text = TextCodec.load(folder, config.server, render=render, max_context=config.model.max_context)
    offer, examples = None, Counter[str]()
    if (learning := config.draft.learning) is not None:
        writer = ExampleWriter(partial(ExampleStore.of, learning), identity.target_model)
        ending.push_async_callback(asyncio.to_thread, writer.close)
        offer, examples = writer.offer, writer.counts
    router = Router(
        ServeMembership(pools[served.target], pools[served.drafter]),
        identity,
        RouterLimits(config.server.max_requests, config.server.target_wait_s, prefixes),
        Audits(config.server.audit, config.model.dtype, alarm, config.model.numerics),
        credentials=credentials_of(config.trust, PeerRole.ROUTER),
        tracer=tracing.sessions("route"),
        examples=offer,
        timeline=timeline,
    )
    ending.push_async_callback(router.close)
    defaults = load_defaults(str(folder)) if config.server.generation_defaults == "model" else NO_DEFAULTS
    draft_prompts = None
    if draft_template is not None:
        draft_prompts = DraftPrompts.load(
            str(draft_template), config.server, render=render, max_context=config.model.max_context
        )
    service = ModelService(
        router,
        text,
        config,
        defaults,
        identity.target_model,
        lambda: router.drafts_are_translated,
        draft_prompts,
    )
    return RoutedModel(served.name, router, service, examples)
