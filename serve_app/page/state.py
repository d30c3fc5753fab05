"""State of the live page, computed from two rounds of samples. Pure.

Sessions appear only as counts, so nothing here identifies a request. Lists are cut for large fleets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict

from cluster.speculation.acceptance import AcceptanceCounts
from cluster.telemetry import Actor, Event, Span, spans, unpack
from serve_app.page.samples import WINDOW_S, DraftSample, Sample, TargetSample, shown_stages

MOST_REPLICAS = 64  # most replicas listed per pool
MOST_TRACKS = 16  # most tracks drawn
MOST_BARS = 250  # most bars per track; the latest

Bar = tuple[str, float, float, int]
"""Stage, start and duration in ms of the window, and number of sessions."""


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetState(_Shown):
    name: str
    sessions: int
    queued: int
    busy: float | None  # share of the time in steps
    tokens_per_s: float | None
    is_drafted_for: bool
    gain: float
    cache: float


class DrafterState(_Shown):
    name: str
    method: str
    sessions: int
    draft_tokens_per_s: float | None
    ahead: float | None  # share of passes ahead of a verdict


class Track(_Shown):
    """Timeline of one actor."""

    actor: str
    role: str
    bars: tuple[Bar, ...]


class PageState(_Shown):
    """Response of GET /page/state. Rates cover the time since the previous sample, and are null without one."""

    model: str
    window_ms: float
    targets: tuple[TargetState, ...]
    drafters: tuple[DrafterState, ...]
    unlisted: int  # replicas beyond those listed
    tokens_per_s: float | None
    busy: float | None  # mean of the targets
    accepted: float | None  # share of recent draft tokens that were accepted
    acceptance: tuple[float, ...]  # by position in a block, given those before it; since the replicas began
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one target replica between two samples."""

    busy: float
    tokens_per_s: float


def page_state(model: str, before: Sequence[Sample], now: Sequence[Sample]) -> PageState:
    """Computes the state; `before` are the samples of a moment ago, or empty."""
    earlier = {sample.name: sample for sample in before}
    targets = [sample for sample in now if isinstance(sample, TargetSample)]
    drafters = [sample for sample in now if isinstance(sample, DraftSample)]
    rates = {sample.name: found for sample in targets if (found := _rates(earlier.get(sample.name), sample))}
    return PageState(
        model=model,
        window_ms=WINDOW_S * 1e3,
        targets=tuple(_target(sample, rates.get(sample.name)) for sample in targets[:MOST_REPLICAS]),
        drafters=tuple(_drafter(sample, earlier.get(sample.name)) for sample in drafters[:MOST_REPLICAS]),
        unlisted=max(0, len(targets) - MOST_REPLICAS) + max(0, len(drafters) - MOST_REPLICAS),
        tokens_per_s=sum(one.tokens_per_s for one in rates.values()) if rates else None,
        busy=sum(one.busy for one in rates.values()) / len(rates) if rates else None,
        accepted=_accepted_share(earlier, targets),
        acceptance=sum((sample.acceptance for sample in targets), AcceptanceCounts()).by_position(),
        tracks=_tracks([*drafters, *targets]),
    )


def _rates(before: Sample | None, now: TargetSample) -> Rates | None:
    """Returns None if the replica was not sampled before, or has restarted since."""
    if not isinstance(before, TargetSample) or (passed := now.at_s - before.at_s) <= 0:
        return None
    tokens = now.decided_tokens - before.decided_tokens
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


def _accepted_share(earlier: dict[str, Sample], targets: Sequence[TargetSample]) -> float | None:
    accepted = wasted = 0
    for sample in targets:
        before = earlier.get(sample.name)
        if isinstance(before, TargetSample):
            accepted += sample.accepted_tokens - before.accepted_tokens
            wasted += sample.wasted_tokens - before.wasted_tokens
    return accepted / (accepted + wasted) if accepted > 0 and wasted >= 0 else None


def _tracks(samples: Sequence[Sample]) -> tuple[Track, ...]:
    """Returns the last seconds up to the latest sample, drafters above targets."""
    actors = [_up_to_now(unpack(sample.recording), sample.at_s) for sample in samples[:MOST_TRACKS]]
    found = spans(actors, shown_stages())
    looked = [sample.at_s + actor.recording.wall_offset_s for sample, actor in zip(samples, actors, strict=False)]
    begins = max(looked, default=0.0) - WINDOW_S
    return tuple(Track(actor=actor.name, role=actor.role, bars=_bars(actor.name, found, begins)) for actor in actors)


def _up_to_now(actor: Actor, now: float) -> Actor:
    """Extends the current pass or step to `now`: an actor runs one at a time."""
    events = actor.recording.events
    ends = {stage.begins[1]: stage.ends[1] for stage in shown_stages()}
    if not events or (end := ends.get(events[-1].name)) is None:
        return actor
    latest = Event(events[-1].order + 1, now, end, events[-1].sessions)
    return replace(actor, recording=replace(actor.recording, events=(*events, latest)))


def _bars(actor: str, found: Sequence[Span], begins: float) -> tuple[Bar, ...]:
    inside = [span for span in found if span.actor == actor and span.ended_s > begins]
    return tuple(_bar(span, begins) for span in inside[-MOST_BARS:])


def _bar(span: Span, begins: float) -> Bar:
    start = max(span.began_s, begins)
    return span.name, round((start - begins) * 1e3, 1), round((span.ended_s - start) * 1e3, 1), len(span.sessions)
