"""Holds sessions back at a target until their grammars are compiled there, so that no step ever waits for one."""

import asyncio
from collections.abc import Awaitable, Callable

from protos.messages import Close, Message, Open, Refusal, RefusalReason

Prepare = Callable[[str], Awaitable[str | None]]
"""Compiles a grammar where it will be needed; returns why not, where that cannot be."""


class GrammarGate:
    """Of one target. What it lets pass goes to `admit`, with the stream that it came on, and refusals to `refuse`."""

    def __init__(
        self, prepare: Prepare, admit: Callable[[str, Open], None], refuse: Callable[[str, Refusal], None]
    ) -> None:
        self._prepare = prepare
        self._admit = admit
        self._refuse = refuse
        self._held: dict[str, tuple[str, Open, asyncio.Task[None]]] = {}  # by session

    def takes(self, stream: str, message: Message) -> bool:
        """Whether it keeps the message for now. A later word on the same session counts alone."""
        if isinstance(message, Open | Close) and message.session in self._held:
            _, held, _ = self._held[message.session]
            if message.attempt >= held.attempt:
                self._drop(message.session)
        if not isinstance(message, Open) or not message.grammar:
            return False
        task = asyncio.create_task(self._pass(stream, message))
        self._held[message.session] = stream, message, task
        return True

    def gone(self, stream: str) -> None:
        """The stream broke: what it opened is nobody's."""
        for session in [session for session, (source, *_) in self._held.items() if source == stream]:
            self._drop(session)

    @property
    def is_empty(self) -> bool:
        return not self._held

    async def _pass(self, stream: str, request: Open) -> None:
        why = await self._prepare(request.grammar)
        del self._held[request.session]
        if why is None:
            self._admit(stream, request)
        else:
            message = f"the grammar cannot be kept to: {why}"
            self._refuse(stream, Refusal(request.session, request.attempt, RefusalReason.INVALID, message))

    def _drop(self, session: str) -> None:
        _, _, task = self._held.pop(session)
        task.cancel()
