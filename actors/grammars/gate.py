"""Holds sessions back at a target until their grammars are compiled there, so that no step ever waits for one."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.envelope import peer_of
from cluster.trust.refusals import Refusals, not_permitted
from protos.messages import Close, Hello, Message, Open, Refusal, RefusalReason

Prepare = Callable[[str], Awaitable[str | None]]
"""Compiles a grammar where it will be needed; returns why not, where that cannot be."""


@dataclass
class HeldSession:
    """What a router's stream opened, and the wait for its grammar."""

    router: str
    open: Open
    task: asyncio.Task[None]


class GrammarGate:
    """Of one target. What it lets pass goes to `admit`, with the stream that it came on, and refusals to `refuse`.

    At most `limit` sessions are held. One that is held belongs to the router that opened it, as one that has passed
    does, of which `router_of` tells the stream.
    """

    def __init__(
        self,
        prepare: Prepare,
        admit: Callable[[str, Open], None],
        refuse: Callable[[str, Refusal], None],
        router_of: Callable[[str], str | None],
        refusals: Refusals,
        limit: int,
    ) -> None:
        self._prepare = prepare
        self._admit = admit
        self._refuse = refuse
        self._router_of = router_of
        self._refusals = refusals
        self._limit = limit
        self._held: dict[str, HeldSession] = {}  # by session

    def takes(self, router: str, message: Message) -> bool:
        """Whether it keeps or has answered the message; if not, the message may go on."""
        if isinstance(message, Open):
            return self._takes_open(router, message)
        if isinstance(message, Close):
            self._close(router, message)
        return False

    def greeted(self, router: str, hello: Hello) -> None:
        """A router's stream is new: of what its older streams left, only the sessions that it lists stay."""
        wanted = {(item.session, item.attempt) for item in hello.live}
        for name, held in list(self._held.items()):
            if peer_of(held.router) != peer_of(router):
                continue
            held.router = router
            if (name, held.open.attempt) not in wanted:
                self._drop(name)

    def gone(self, router: str) -> None:
        """The stream broke: what it opened is nobody's."""
        for name, held in list(self._held.items()):
            if held.router == router:
                self._drop(name)

    @property
    def is_empty(self) -> bool:
        return not self._held

    def _takes_open(self, router: str, request: Open) -> bool:
        """Holds a session that has a grammar; a later attempt takes the place of one that is held."""
        name = request.session
        if (held := self._held.get(name)) is not None:
            if held.router != router:
                self._refusals.note(router, "an Open of another router's session", name)
                self._refuse(router, not_permitted(request))
                return True
            if held.open.attempt >= request.attempt:
                return True
            self._drop(name)
        if not request.grammar or self._router_of(name) not in (None, router):
            return False
        if len(self._held) >= self._limit:
            why = f"{len(self._held)} sessions wait for their grammars already"
            self._refuse(router, Refusal(name, request.attempt, RefusalReason.OVERLOADED, why))
            return True
        self._held[name] = HeldSession(router, request, asyncio.create_task(self._pass(request)))
        return True

    def _close(self, router: str, close: Close) -> None:
        """Forgets a session; another router's, or a newer attempt is left alone."""
        held = self._held.get(close.session)
        if held is not None and held.router == router and held.open.attempt <= close.attempt:
            self._drop(close.session)

    async def _pass(self, request: Open) -> None:
        why = await self._prepare(request.grammar)
        held = self._held.get(request.session)
        if held is None or held.open is not request:
            return  # dropped meanwhile, though compiling did not end with it
        del self._held[request.session]
        if why is None:
            self._admit(held.router, request)
        else:
            message = f"the grammar cannot be kept to: {why}"
            self._refuse(held.router, Refusal(request.session, request.attempt, RefusalReason.INVALID, message))

    def _drop(self, session: str) -> None:
        self._held.pop(session).task.cancel()
