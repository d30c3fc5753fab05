"""Fake generator that plays scripted events and records its sessions."""

import asyncio
from collections.abc import Callable
from functools import partial

from cluster.routing.ledger import CommittedTokens, Ended, Event, Failed, Generation

STALL = "stall"
"""Script entry after which nothing more is generated."""

Script = list[CommittedTokens | Ended | Exception | str]


class ScriptedGenerator:
    """Plays `scripts[choice]` for each session; further choices repeat the last script."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.generations: list[Generation] = []
        self.running: set[str] = set()
        self.closed: list[int] = []  # choices of ended sessions
        self.left = asyncio.Event()  # set when the last running session ends
        self.room = 1 << 30
        self.checked: list[int] = []
        self.refusal: Exception | None = None  # raised when full

    def check_room(self, sessions: int) -> None:
        self.checked.append(sessions)
        if self.refusal is not None and sessions > self.room:
            raise self.refusal

    def start(self, generation: Generation, deliver: Callable[[Event], None]) -> Callable[[], None]:
        self.generations.append(generation)
        self.running.add(generation.session)
        self.left.clear()
        for output in self.scripts[min(generation.choice, len(self.scripts) - 1)]:
            if isinstance(output, str):
                break
            deliver(Failed(output) if isinstance(output, Exception) else output)  # type: ignore[arg-type]  # any failure
        return partial(self._close, generation)

    def _close(self, generation: Generation) -> None:
        if generation.session in self.running:
            self.closed.append(generation.choice)
            self.running.remove(generation.session)
            if not self.running:
                self.left.set()
