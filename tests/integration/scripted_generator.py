"""A generator that plays a script, and remembers what was asked of it and what was closed."""

import asyncio
from collections.abc import AsyncIterator

from cluster.routing.ledger import CommittedTokens, Ended, Generation

STALL = "stall"
"""In a script: nothing more comes."""

Script = list[CommittedTokens | Ended | Exception | str]


class ScriptedGenerator:
    """Plays `scripts[choice]` for each session, the last script for choices beyond."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.generations: list[Generation] = []
        self.running: set[str] = set()
        self.left = asyncio.Event()  # the last running session is over
        self.room = 1 << 30
        self.checked: list[int] = []
        self.refusal: Exception | None = None  # what is raised where there is no room

    def check_room(self, sessions: int) -> None:
        self.checked.append(sessions)
        if self.refusal is not None and sessions > self.room:
            raise self.refusal

    async def generate(self, generation: Generation) -> AsyncIterator[CommittedTokens | Ended]:
        self.generations.append(generation)
        self.running.add(generation.session)
        self.left.clear()
        try:
            for output in self.scripts[min(generation.choice, len(self.scripts) - 1)]:
                if isinstance(output, Exception):
                    raise output
                if isinstance(output, str):
                    await asyncio.Event().wait()
                else:
                    yield output
        finally:
            self.running.remove(generation.session)
            if not self.running:
                self.left.set()
