"""A ring buffer of what an actor did when, in the actor's own logical order.

Knows nothing of who reads it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to some sessions at one moment."""

    order: int  # rises by one per event of this actor
    at_s: float
    name: str
    sessions: tuple[str, ...]


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
