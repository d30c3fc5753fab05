"""Which target a session goes to: the least loaded that is not full, unless another has more of its text cached."""

import secrets
from collections import Counter
from collections.abc import Sequence

from cluster.routing.balancing import Peers
from cluster.routing.prefix_homes import PrefixHomes, PrefixOptions
from cluster.routing.session import Session

KEY_BYTES = 32  # of the hash of pages; drawn for each router
FULL_FOR_S = 1.0  # how long a target that said it is full is left alone


class TargetChoice:
    """Of one router; hears where each session goes, and so what each target has computed."""

    def __init__(self, targets: Peers, options: PrefixOptions) -> None:
        self.routed: Counter[str] = Counter()  # by `prefix`, where something of the text was there, or by `load` alone
        self._targets = targets
        self._homes = PrefixHomes(secrets.token_bytes(KEY_BYTES), options)
        self._prompts: dict[str, Sequence[bytes]] = {}  # keys of their pages, by session
        self._full_until: dict[str, float] = {}  # by address of a target that said it is full

    def choose(self, session: Session, now: float) -> str | None:
        """One of those that take sessions now, if any does; where a session has failed only as a last resort."""
        worth = self._homes.worth(self._prompt(session))
        return self._targets.choose(lambda target: self._has_room(target, now), session.failed_targets, worth)

    def are_full(self, now: float) -> bool:
        """Whether there are targets, and each has just said that it is full."""
        return bool(self._targets) and self._targets.choose(lambda target: self._has_room(target, now)) is None

    def refused(self, target: str, now: float) -> None:
        """It says that it is full."""
        self._full_until[target] = now + FULL_FOR_S

    def moved(self, session: Session, left: str | None) -> None:
        """The target that a session goes to will have its prompt; the one that it leaves has all that was committed."""
        if left is not None and left in self._targets:
            self._homes.computed(left, self._keys(session, session.tokens))
        if session.target is not None:
            prompt = self._prompt(session)
            self.routed["prefix" if session.target in self._homes.found(prompt) else "load"] += 1
            self._homes.computed(session.target, prompt)

    def over(self, session: Session) -> None:
        """It goes nowhere any more."""
        self._prompts.pop(session.generation.session, None)

    def gone(self, target: str) -> None:
        """Its cache is gone with it."""
        self._homes.forget(target)

    def _has_room(self, target: str, now: float) -> bool:
        return self._full_until.get(target, 0.0) <= now

    def _keys(self, session: Session, tokens: Sequence[int]) -> list[bytes]:
        return self._homes.keys(tokens, session.generation.cache_salt.encode())

    def _prompt(self, session: Session) -> Sequence[bytes]:
        name = session.generation.session
        if name not in self._prompts:
            self._prompts[name] = self._keys(session, session.generation.prompt)
        return self._prompts[name]
