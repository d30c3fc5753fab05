"""Samples of target replicas and drafters for the live page: counters, and the activity of the last seconds.

A sample is small however long its replica has run, and contains no text.
"""

from dataclasses import dataclass

from actors.drafter import Drafter
from actors.target import TargetReplica
from cluster.speculation.acceptance import AcceptanceCounts
from cluster.telemetry import STAGES, Actor, Stage, Timeline, pack

WINDOW_S = 3.0
SHOWN_STAGES = ("draft", "draft ahead", "verify")
MOST_BYTES = 20_000  # size limit of a recording, which keeps the latest events


def shown_stages() -> list[Stage]:
    """Returns the stages that are drawn: those that begin and end at one actor."""
    return [stage for stage in STAGES if stage.name in SHOWN_STAGES]


@dataclass(frozen=True, slots=True)
class TargetSample:
    """Sample of one target replica; counts are since it began."""

    name: str
    at_s: float  # on its own clock
    sessions: int
    queued: int
    step_s: float
    decided_tokens: int
    accepted_tokens: int
    wasted_tokens: int
    acceptance: AcceptanceCounts
    is_drafted_for: bool  # whether blocks were requested for the latest step
    gain: float  # of speculation over non-speculative decoding
    cache: float  # share of its pages that sessions hold
    recording: bytes


@dataclass(frozen=True, slots=True)
class DraftSample:
    """Sample of one drafter; counts are since it began."""

    name: str
    at_s: float  # on its own clock
    method: str
    sessions: int
    draft_tokens: int  # sent to targets
    passes: int
    passes_ahead: int  # passes ahead of a verdict
    recording: bytes


Sample = TargetSample | DraftSample


def target_sample(replica: TargetReplica, name: str) -> TargetSample:
    """Samples a target on its event loop, in well under a millisecond."""
    scheduler = replica.scheduler
    load = scheduler.load()
    pages = scheduler.pages
    return TargetSample(
        name=name,
        at_s=replica.timeline.now(),
        sessions=int(load["sessions"]),
        queued=int(load["queued"]),
        step_s=scheduler.step_s,
        decided_tokens=replica.decided_tokens,
        accepted_tokens=scheduler.accepted_tokens,
        wasted_tokens=scheduler.wasted_tokens,
        acceptance=scheduler.acceptance,
        is_drafted_for=scheduler.is_drafted_for,
        gain=scheduler.speculation["gain"],
        cache=pages["held"] / pages["total"],
        recording=_recording("target", name, replica.timeline),
    )


def draft_sample(drafter: Drafter, name: str, method: str) -> DraftSample:
    """Samples a drafter in the same way."""
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
    return pack(Actor(role, name, timeline.latest(WINDOW_S, events)), MOST_BYTES)
