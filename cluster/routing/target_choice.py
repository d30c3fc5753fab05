"""Choice of a session's target: the least loaded that is not full, unless another has more of the text cached."""

import secrets
from collections import Counter
from collections.abc import Sequence

from cluster.routing.balancing import Peers
from cluster.routing.ledger import Session
from cluster.routing.prefix_affinity import PrefixHomes, PrefixOptions

KEY_BYTES = 32  # length of the key of page hashes, which each router draws
FULL_FOR_S = 1.0  # pause before a target that reported that it is full is tried again


class TargetChoice:
    """Chooses targets for one router; tracks session placement and each target's cached prefixes."""

    def __init__(self, targets: Peers, options: PrefixOptions) -> None:
        self.routed: Counter[str] = Counter()  # by reason: `prefix` if the target has part of the text, else `load`
        self._targets = targets
        self._homes = PrefixHomes(secrets.token_bytes(KEY_BYTES), options)
        self._prompts: dict[str, Sequence[bytes]] = {}  # page keys, by session
        self._full_until: dict[str, float] = {}  # by address, for targets that reported that they are full

    def choose(self, session: Session, now: float) -> str | None:
        """Returns a target that accepts sessions now, or None.

        One on which the session failed only as a last resort.
        """
        worth = self._homes.worth(self._prompt(session))
        return self._targets.choose(lambda target: self._has_room(target, now), session.failed_targets, worth)

    def are_full(self, now: float) -> bool:
        """Returns True if there are targets and each has just reported that it is full."""
        return bool(self._targets) and self._targets.choose(lambda target: self._has_room(target, now)) is None

    def refused(self, target: str, now: float) -> None:
        """Records that a target reported that it is full."""
        self._full_until[target] = now + FULL_FOR_S

    def moved(self, session: Session, left: str | None) -> None:
        """Records a session's move: its new target will have the prompt cached, `left` has all committed tokens."""
        if left is not None and left in self._targets:
            self._homes.computed(left, self._keys(session, session.tokens))
        if session.target is not None:
            prompt = self._prompt(session)
            self.routed["prefix" if session.target in self._homes.found(prompt) else "load"] += 1
            self._homes.computed(session.target, prompt)

    def over(self, session: Session) -> None:
        """Drops a session that is over."""
        self._prompts.pop(session.generation.session, None)

    def gone(self, target: str) -> None:
        """Drops a target whose cache is gone with it."""
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
