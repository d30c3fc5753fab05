"""Which target a session goes to: the least loaded, unless another has more of its text in the cache."""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.routing.balancing import Peers
from cluster.routing.prefix_homes import PrefixHomes, PrefixOptions
from cluster.routing.session import Session

KEY_BYTES = 32  # of the hash of pages; drawn for each router


class TargetChoice:
    """Of one router; hears where each session goes, and so what each target has computed."""

    def __init__(self, targets: Peers, options: PrefixOptions) -> None:
        self.routed: Counter[str] = Counter()  # by `prefix`, where something of the text was there, or by `load` alone
        self._targets = targets
        self._homes = PrefixHomes(secrets.token_bytes(KEY_BYTES), options)
        self._prompts: dict[str, Sequence[bytes]] = {}  # keys of their pages, by session

    def choose(self, session: Session, takes: Callable[[str], bool]) -> str | None:
        """One of those that take sessions now, if any does; where a session has failed only as a last resort."""
        return self._targets.choose(takes, session.failed_targets, self._homes.worth(self._prompt(session)))

    def moved(self, session: Session, left: str | None) -> None:
        """The target that a session goes to will have its prompt; the one that it leaves has all that was committed."""
        if left is not None and left in self._targets:
            self._homes.computed(left, self._homes.keys(session.tokens))
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

    def _prompt(self, session: Session) -> Sequence[bytes]:
        name = session.generation.session
        if name not in self._prompts:
            self._prompts[name] = self._homes.keys(session.generation.prompt)
        return self._prompts[name]
