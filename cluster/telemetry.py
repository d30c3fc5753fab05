"""Records recent events of actors, derives spans from them, and encodes data for other processes.

A span is the time between two events; `spans` derives spans from the recordings of all actors. Data is exchanged as
compressed JSON, which is validated on receipt and, unlike pickle, cannot execute code.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter
from pydantic_core import to_json

MAX_UNPACKED_BYTES = 1 << 26  # maximum size of decompressed data, in bytes

T = TypeVar("T")


def packed(answer: object) -> bytes:
    """Encodes dataclasses, tuples, dicts and plain values as compressed JSON."""
    return zlib.compress(to_json(answer, inf_nan_mode="constants"))


def unpacked(data: bytes, shape: TypeAdapter[T]) -> T:
    """Decodes `data` as a value of type `shape`; raises ValueError if it is malformed or exceeds MAX_UNPACKED_BYTES."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"malformed packed data; run the same version of Slipstream on both sides: {error}") from error
    if not inflating.eof:
        raise ValueError(f"packed data is truncated or exceeds the limit of {MAX_UNPACKED_BYTES} bytes")
    return shape.validate_json(text)  # a ValidationError is a ValueError


# Ray returns results below 100 KiB inline and larger ones through the object store. If the caller has dropped a
# reference to a result in the object store, Serve's watcher of that reference terminates the caller.
MESSAGE_BYTES = 90_000
MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Event:
    """An event of one or more sessions."""

    order: int  # sequence number among this actor's events
    at_s: float
    name: str
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Events of one actor, for export; `at_s + wall_offset_s` is comparable between actors.

    Times of actors on different machines are only as accurate as the synchronization of their wall clocks.
    """

    wall_offset_s: float
    events: tuple[Event, ...]


class Timeline:
    """Keeps the latest `capacity` events."""

    def __init__(self, clock: Callable[[], float], capacity: int = 4096) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=capacity)
        self._order = 0

    def record(self, name: str, *sessions: str) -> None:
        self._events.append(Event(self._order, self._clock(), name, sessions))
        self._order += 1

    def events(self) -> list[Event]:
        return list(self._events)

    def now(self) -> float:
        """Returns the current time on the clock used for events."""
        return self._clock()

    def latest(self, seconds: float, names: Container[str], wall_clock: Callable[[], float] = time.time) -> Recording:
        """Returns the events of the last `seconds` with a name in `names`."""
        now = self._clock()
        newest = takewhile(lambda event: event.at_s >= now - seconds, reversed(self._events))
        events = [event for event in newest if event.name in names]
        return Recording(wall_clock() - now, tuple(reversed(events)))

    def recording(self, wall_clock: Callable[[], float] = time.time) -> Recording:
        return Recording(wall_clock() - self._clock(), tuple(self._events))


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor with its recording, for export."""

    role: str  # router, drafter or target
    name: str
    recording: Recording


# ---------------------------------------------------------------- messages


Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class _Columns:
    """An actor's events in columns, which compress better than a list of events.

    Each name and each session appears once.
    """

    role: str
    name: str
    wall_offset_s: float
    first: int  # sequence number of the first event
    names: list[str]
    sessions: list[str]
    groups: list[list[Index]]  # distinct groups of sessions: indices in `sessions`
    passed: list[int]  # per event: microseconds since the previous event
    named: list[Index]  # per event: index in `names`
    grouped: list[Index]  # per event: index in `groups`


COLUMNS = TypeAdapter(_Columns)


def pack(actor: Actor, limit: int = MESSAGE_BYTES) -> bytes:
    """Packs a recording into one message; drops the oldest events if the message would exceed `limit` bytes."""
    events = actor.recording.events
    while len(message := packed(_columns(actor, events))) > limit:
        events = events[max(1, len(events) // 8) :]
    return message


def _columns(actor: Actor, events: Sequence[Event]) -> _Columns:
    name_at = _numbered(event.name for event in events)
    group_at = _numbered(event.sessions for event in events)
    session_at = _numbered(session for group in group_at for session in group)
    times = [round(event.at_s * MICRO) for event in events]
    return _Columns(
        role=actor.role,
        name=actor.name,
        wall_offset_s=actor.recording.wall_offset_s,
        first=events[0].order if events else 0,
        names=list(name_at),
        sessions=list(session_at),
        groups=[[session_at[session] for session in group] for group in group_at],
        passed=[later - earlier for earlier, later in zip([0, *times], times, strict=False)],
        named=[name_at[event.name] for event in events],
        grouped=[group_at[event.sessions] for event in events],
    )


def _numbered(values: Iterable[T]) -> dict[T, int]:
    """Maps each distinct value to an index, in order of first occurrence."""
    return {value: index for index, value in enumerate(dict.fromkeys(values))}


def unpack(message: bytes) -> Actor:
    """Decodes a message of `pack`, with times rounded to microseconds; raises ValueError if it is malformed."""
    columns = unpacked(message, COLUMNS)
    events = []
    at = 0
    try:
        groups = [tuple(columns.sessions[index] for index in group) for group in columns.groups]
        rows = zip(columns.passed, columns.named, columns.grouped, strict=True)
        for order, (passed, named, grouped) in enumerate(rows, start=columns.first):
            at += passed
            events.append(Event(order, at / MICRO, columns.names[named], groups[grouped]))
    except IndexError as error:
        raise ValueError("malformed recording: an index is out of range") from error
    return Actor(columns.role, columns.name, Recording(columns.wall_offset_s, tuple(events)))


# ---------------------------------------------------------------- spans


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a round, delimited by two events of a session, possibly of different actors."""

    name: str
    begins: tuple[str, str]  # (role, event name)
    ends: tuple[str, str]
    shown_at: str  # role of the actor to show the span for


STAGES = (
    Stage("queue", ("drafter", "verdict"), ("drafter", "draft"), "drafter"),
    Stage("draft", ("drafter", "draft"), ("drafter", "drafted"), "drafter"),
    Stage("draft ahead", ("drafter", "draft ahead"), ("drafter", "drafted"), "drafter"),
    Stage("send", ("drafter", "sent"), ("target", "block"), "drafter"),
    Stage("wait", ("target", "block"), ("target", "verify"), "target"),
    Stage("verify", ("target", "verify"), ("target", "decided"), "target"),
    Stage("return", ("target", "decided"), ("drafter", "verdict"), "target"),
    Stage("commit", ("target", "decided"), ("router", "commit"), "router"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of a group of sessions, in wall time."""

    actor: str
    role: str
    name: str
    began_s: float
    ended_s: float
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    actor: Actor
    event: Event


def spans(actors: Iterable[Actor], stages: Sequence[Stage] = STAGES) -> list[Span]:
    """Returns all spans whose start and end were recorded, sorted by start time. Sessions with the same start and end
    events share a span.
    """
    moments = [
        _Moment(event.at_s + actor.recording.wall_offset_s, actor, event)
        for actor in actors
        for event in actor.recording.events
    ]
    moments.sort(key=lambda moment: (moment.at_s, moment.actor.name, moment.event.order))
    stage_spans = [span for stage in stages for span in _spans_of(stage, moments)]
    return sorted(stage_spans, key=lambda span: (span.began_s, span.ended_s, span.actor, span.name))


def _spans_of(stage: Stage, moments: Iterable[_Moment]) -> list[Span]:
    begun: dict[str, _Moment] = {}  # latest start event, by session
    together: dict[tuple[str, str, float, float], list[str]] = {}  # sessions by actor name, role, start and end
    for moment in moments:
        what = (moment.actor.role, moment.event.name)
        for session in moment.event.sessions:
            if what == stage.begins:
                begun[session] = moment
            elif what == stage.ends and session in begun:
                beginning = begun.pop(session)
                owner = moment.actor if moment.actor.role == stage.shown_at else beginning.actor
                together.setdefault((owner.name, owner.role, beginning.at_s, moment.at_s), []).append(session)
    return [
        Span(name, role, stage.name, began_s, ended_s, tuple(sessions))
        for (name, role, began_s, ended_s), sessions in together.items()
    ]
