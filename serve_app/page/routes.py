"""HTTP routes of the live page: its files, and its state as JSON.

Each replica returns small samples (`target_sample`, `draft_sample`): counters, and the activity of the last seconds.
`PoolSamples` collects them through Ray Serve, and `page_state` computes the page's state from two rounds of samples.
`PageWatch` samples only while the page is open, at most once per second for all viewers.

Samples contain session counts but no text or ids, so no request can be identified. Long lists are truncated.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.drafter import Drafter
from actors.learning.trainer import TrainerStatus
from actors.target import TargetReplica
from cluster.speculation.estimators import AcceptanceCounts
from cluster.telemetry import STAGES, Actor, Event, Span, Stage, Timeline, pack, spans, unpack
from serve_app.api.streaming import as_json

WINDOW_S = 3.0
SHOWN_STAGES = ("draft", "draft ahead", "verify")
MAX_RECORDING_BYTES = 20_000  # maximum recording size; the oldest events are dropped


def shown_stages() -> list[Stage]:
    """Returns the stages to draw, each within one actor."""
    return [stage for stage in STAGES if stage.name in SHOWN_STAGES]


@dataclass(frozen=True, slots=True)
class TargetSample:
    """Sample of one target replica; counts start with the replica."""

    name: str
    at_s: float  # seconds on the replica's own clock
    sessions: int
    queued: int
    step_s: float
    committed_tokens: int
    accepted_tokens: int
    wasted_tokens: int
    acceptance: AcceptanceCounts
    is_drafted_for: bool  # whether the latest step requested blocks
    gain: float  # throughput relative to non-speculative decoding
    cache: float  # share of cache pages held by sessions
    recording: bytes


@dataclass(frozen=True, slots=True)
class DraftSample:
    """Sample of one drafter; counts start with the drafter."""

    name: str
    at_s: float  # seconds on the drafter's own clock
    method: str
    sessions: int
    draft_tokens: int  # draft tokens sent to targets
    passes: int
    passes_ahead: int  # drafting passes ahead of a verdict
    recording: bytes


@dataclass(frozen=True, slots=True)
class TrainerSample:
    """Sample of the trainer, if the draft learns."""

    name: str
    status: TrainerStatus


Sample = TargetSample | DraftSample | TrainerSample


def target_sample(replica: TargetReplica, name: str) -> TargetSample:
    """Samples a target on its event loop; takes well under a millisecond."""
    scheduler = replica.scheduler
    load = scheduler.load()
    pages = scheduler.page_counts
    return TargetSample(
        name=name,
        at_s=replica.timeline.now(),
        sessions=int(load["sessions"]),
        queued=int(load["queued"]),
        step_s=scheduler.counts.step_s,
        committed_tokens=replica.committed_tokens,
        accepted_tokens=scheduler.counts.accepted_tokens,
        wasted_tokens=scheduler.counts.wasted_tokens,
        acceptance=scheduler.controller.acceptance,
        is_drafted_for=scheduler.is_drafted_for,
        gain=scheduler.controller.load.gain,
        cache=pages["held"] / pages["total"],
        recording=_recording("target", name, replica.timeline),
    )


def draft_sample(drafter: Drafter, name: str, method: str) -> DraftSample:
    """Samples a drafter on its event loop."""
    counts = drafter.scheduler.counts
    return DraftSample(
        name=name,
        at_s=drafter.timeline.now(),
        method=method,
        sessions=int(drafter.scheduler.load()["sessions"]),
        draft_tokens=counts["draft_tokens"],
        passes=counts["passes"],
        passes_ahead=counts["passes_ahead"],
        recording=_recording("drafter", name, drafter.timeline),
    )


def _recording(role: str, name: str, timeline: Timeline) -> bytes:
    events = {event for stage in shown_stages() for _, event in (stage.begins, stage.ends)}
    return pack(Actor(role, name, timeline.latest(WINDOW_S, events)), MAX_RECORDING_BYTES)


ANSWER_S = 2.0

log = logging.getLogger("ray.serve")


class PoolSamples:
    """Samples every replica of the pools at once; skips a pool that does not answer in time."""

    def __init__(self, *pools: DeploymentHandle[Any]) -> None:
        self._pools = pools

    async def __call__(self) -> Sequence[Sample]:
        answers = await asyncio.gather(*map(_sample_pool, self._pools))
        return [sample for samples in answers for sample in samples]


async def _sample_pool(pool: DeploymentHandle[Any]) -> Sequence[Sample]:
    """Samples one pool; skips replicas that fail."""
    try:
        answers = await pool.broadcast("sample").results_async(timeout_s=ANSWER_S, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        log.info("the live page omits %s: %s", pool.deployment_name, error)
        return []
    return [answer for answer in answers if isinstance(answer, Sample)]


MAX_REPLICAS = 64  # replicas listed per pool
MAX_TRACKS = 16  # tracks drawn
MAX_BARS = 250  # latest bars drawn per track

Bar = tuple[str, float, float, int]
"""Stage, start (ms from the window's start), duration (ms) and number of sessions."""


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetState(_Shown):
    name: str
    sessions: int
    queued: int
    busy: float | None  # share of time spent in steps
    tokens_per_s: float | None
    is_drafted_for: bool
    gain: float
    cache: float


class DrafterState(_Shown):
    name: str
    method: str
    sessions: int
    draft_tokens_per_s: float | None
    ahead: float | None  # share of drafting passes ahead of a verdict


class LearningState(_Shown):
    """State of the trainer, and results of its latest training run."""

    phase: str
    examples: int
    new_examples: int  # examples since the start of the latest training run
    version: int  # version of the draft; 0: as configured
    progress: float | None  # completed share of the current training run
    before: float | None  # agreement on held-out examples before the latest run
    after: float | None  # agreement on held-out examples after the latest run


class Track(_Shown):
    """Timeline of one actor."""

    actor: str
    role: str
    bars: tuple[Bar, ...]


class PageState(_Shown):
    """Response of GET /page/state. Rates cover the time since the previous sample and are null without one."""

    model: str
    window_ms: float
    targets: tuple[TargetState, ...]
    drafters: tuple[DrafterState, ...]
    learning: LearningState | None  # null if the draft does not learn
    unlisted: int  # number of replicas omitted from the lists
    tokens_per_s: float | None
    busy: float | None  # mean over targets
    accepted: float | None  # accepted share of recent draft tokens
    acceptance: tuple[float, ...]  # since start, by position in a block, given acceptance of all earlier tokens
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one target replica between two samples."""

    busy: float
    tokens_per_s: float


def page_state(model: str, before: Sequence[Sample], now: Sequence[Sample]) -> PageState:
    """Computes the page's state from the previous samples (`before`, may be empty) and the current samples."""
    earlier = {sample.name: sample for sample in before}
    targets = [sample for sample in now if isinstance(sample, TargetSample)]
    drafters = [sample for sample in now if isinstance(sample, DraftSample)]
    rates = {
        sample.name: sample_rates for sample in targets if (sample_rates := _rates(earlier.get(sample.name), sample))
    }
    return PageState(
        model=model,
        window_ms=WINDOW_S * 1e3,
        targets=tuple(_target(sample, rates.get(sample.name)) for sample in targets[:MAX_REPLICAS]),
        drafters=tuple(_drafter(sample, earlier.get(sample.name)) for sample in drafters[:MAX_REPLICAS]),
        learning=next((_learning(one.status) for one in now if isinstance(one, TrainerSample)), None),
        unlisted=max(0, len(targets) - MAX_REPLICAS) + max(0, len(drafters) - MAX_REPLICAS),
        tokens_per_s=sum(one.tokens_per_s for one in rates.values()) if rates else None,
        busy=sum(one.busy for one in rates.values()) / len(rates) if rates else None,
        accepted=_accepted_share(earlier, targets),
        acceptance=sum((sample.acceptance for sample in targets), AcceptanceCounts()).by_position(),
        tracks=_tracks([*drafters, *targets]),
    )


def _rates(before: Sample | None, now: TargetSample) -> Rates | None:
    """Returns the rates since `before`; None if the replica has no earlier sample or has restarted."""
    if not isinstance(before, TargetSample) or (passed := now.at_s - before.at_s) <= 0:
        return None
    tokens = now.committed_tokens - before.committed_tokens
    if tokens < 0:
        return None
    return Rates(min(1.0, (now.step_s - before.step_s) / passed), tokens / passed)


def _target(sample: TargetSample, rates: Rates | None) -> TargetState:
    return TargetState(
        name=sample.name,
        sessions=sample.sessions,
        queued=sample.queued,
        busy=rates.busy if rates else None,
        tokens_per_s=rates.tokens_per_s if rates else None,
        is_drafted_for=sample.is_drafted_for,
        gain=sample.gain,
        cache=sample.cache,
    )


def _drafter(sample: DraftSample, before: Sample | None) -> DrafterState:
    rate = ahead = None
    if isinstance(before, DraftSample) and (passed := sample.at_s - before.at_s) > 0:
        rate = max(0.0, (sample.draft_tokens - before.draft_tokens) / passed)
    if passes := sample.passes + sample.passes_ahead:
        ahead = sample.passes_ahead / passes
    return DrafterState(
        name=sample.name, method=sample.method, sessions=sample.sessions, draft_tokens_per_s=rate, ahead=ahead
    )


def _learning(status: TrainerStatus) -> LearningState:
    return LearningState(
        phase=status.phase,
        examples=status.examples,
        new_examples=status.new_examples,
        version=status.version,
        progress=status.progress.step / status.progress.steps if status.progress else None,
        before=status.before.agreement if status.before else None,
        after=status.after.agreement if status.after else None,
    )


def _accepted_share(earlier: dict[str, Sample], targets: Sequence[TargetSample]) -> float | None:
    accepted = wasted = 0
    for sample in targets:
        before = earlier.get(sample.name)
        if isinstance(before, TargetSample):
            accepted += sample.accepted_tokens - before.accepted_tokens
            wasted += sample.wasted_tokens - before.wasted_tokens
    return accepted / (accepted + wasted) if accepted > 0 and wasted >= 0 else None


def _tracks(samples: Sequence[TargetSample | DraftSample]) -> tuple[Track, ...]:
    """Returns timelines of the last seconds before the latest sample, drafters above targets."""
    actors = [_clip_to_now(unpack(sample.recording), sample.at_s) for sample in samples[:MAX_TRACKS]]
    all_spans = spans(actors, shown_stages())
    sampled_at = [sample.at_s + actor.recording.wall_offset_s for sample, actor in zip(samples, actors, strict=False)]
    begins = max(sampled_at, default=0.0) - WINDOW_S
    return tuple(
        Track(actor=actor.name, role=actor.role, bars=_bars(actor.name, all_spans, begins)) for actor in actors
    )


def _clip_to_now(actor: Actor, now: float) -> Actor:
    """Extends the actor's current pass or step, if any, to `now`."""
    events = actor.recording.events
    ends = {stage.begins[1]: stage.ends[1] for stage in shown_stages()}
    if not events or (end := ends.get(events[-1].name)) is None:
        return actor
    latest = Event(events[-1].order + 1, now, end, events[-1].sessions)
    return replace(actor, recording=replace(actor.recording, events=(*events, latest)))


def _bars(actor: str, all_spans: Sequence[Span], begins: float) -> tuple[Bar, ...]:
    inside = [span for span in all_spans if span.actor == actor and span.ended_s > begins]
    return tuple(_bar(span, begins) for span in inside[-MAX_BARS:])


def _bar(span: Span, begins: float) -> Bar:
    start = max(span.began_s, begins)
    return span.name, round((start - begins) * 1e3, 1), round((span.ended_s - start) * 1e3, 1), len(span.sessions)


PERIOD_S = 1.0
STALE_S = 5.0  # maximum age in seconds of a sample used for rates

Collect = Callable[[], Awaitable[Sequence[Sample]]]


class PageWatch:
    """Caches the latest state, and the samples for the next rates."""

    def __init__(self, model: str, collect: Collect, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._collect = collect
        self._clock = clock
        self._sampling_lock = asyncio.Lock()
        self._taken_s = float("-inf")
        self._samples: Sequence[Sample] = ()
        self._trainer: TrainerSample | None = None  # latest sample; a trainer without idle cores may not answer
        self._state: PageState | None = None

    async def state(self) -> PageState:
        """Returns a state at most a second old; concurrent callers share one round of samples."""
        async with self._sampling_lock:
            age = self._clock() - self._taken_s
            if self._state is None or age >= PERIOD_S:
                samples = self._with_trainer(await self._collect())
                before = self._samples if age < STALE_S else ()
                self._state = page_state(self._model, before, samples)
                self._samples = samples
                self._taken_s = self._clock()
            return self._state

    def _with_trainer(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Adds the trainer's latest sample if it did not answer."""
        trainers = [sample for sample in samples if isinstance(sample, TrainerSample)]
        if not trainers and self._trainer is not None:
            return [*samples, self._trainer]
        self._trainer = trainers[0] if trainers else None
        return samples


HEADERS = {
    "Cache-Control": "no-cache",
    # Allow only this server's own files; forbid embedding in frames.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_routes(watch: PageWatch) -> list[Route]:
    """Returns the routes of `/`, the static files, and `/page/state`."""

    async def state(_: Request) -> Response:
        return as_json(await watch.state())

    return [_file_route("/", "index.html"), *_static_routes(), Route("/page/state", state)]


def _static_routes() -> list[Route]:
    names = [path.name for path in (files("serve_app.page") / "static").iterdir() if path.name != "index.html"]
    return [_file_route(f"/page/{name}", name) for name in names]


def _file_route(path: str, name: str) -> Route:
    """Serves a file from memory; reads it once, since files are few and small."""
    content = (files("serve_app.page") / "static" / name).read_bytes()
    media_type = TYPES[name[name.rindex(".") :]]

    async def answer(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer)
