"""Callers: who shows which key, what each may have at once, and what a key makes of its requests.

Pure but for the count of what is in flight.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cluster.errors import CapacityError, RequestError
from cluster.routing.ledger import Generation
from cluster.trust.api_keys import ApiKey
from serve_app.http.wire.schemas import GenerationRequest


@dataclass(eq=False)
class Caller:
    """Whoever shows one key; anybody, where no keys are set."""

    name: str | None = None
    max_sessions: int | None = None
    max_tokens: int | None = None
    cache_salt: str = ""
    sessions: int = 0  # in flight

    @contextmanager
    def exchange(self) -> Iterator["Exchange"]:
        """One request, whose sessions count until it ends."""
        exchange = Exchange(self)
        try:
            yield exchange
        finally:
            self.sessions -= exchange.sessions

    def check(self, request: GenerationRequest) -> None:
        """Refuses more tokens than this key may ask for."""
        for name, limit in request.token_limits.items():
            if self.max_tokens is not None and limit > self.max_tokens:
                message = f"{name} is {limit}, expected at most {self.max_tokens}, which this key allows"
                raise RequestError(message, name)

    def bounded(self, generations: Sequence[Generation]) -> list[Generation]:
        """The sessions with what this key allows them."""
        return [self._bounded(one) for one in generations]

    def _bounded(self, one: Generation) -> Generation:
        most = one.max_len if self.max_tokens is None else len(one.prompt) + self.max_tokens
        salt = _both(self.cache_salt, one.cache_salt) if self.cache_salt else one.cache_salt
        return replace(one, max_len=min(one.max_len, most), cache_salt=salt)


@dataclass(eq=False)
class Exchange:
    """One request of a caller's."""

    caller: Caller
    sessions: int = 0

    def take(self, sessions: int) -> None:
        """Counts the sessions that the request is to have; refuses those that there is no room for, now or ever."""
        most = self.caller.max_sessions
        if most is not None and sessions > most:
            raise RequestError(f"n: {sessions} sessions are more than the {most} that this key may have", "n")
        if most is not None and self.caller.sessions + sessions > most:
            raise CapacityError(f"this key has {self.caller.sessions} of {most} sessions in flight; try again later")
        self.caller.sessions += sessions
        self.sessions += sessions


@dataclass(frozen=True)
class Callers:
    """All whose keys are known."""

    by_digest: Mapping[bytes, Caller] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Mapping[str, ApiKey]) -> "Callers":
        return cls({bytes.fromhex(key.sha256): _caller(name, key) for name, key in keys.items()})

    @property
    def need_keys(self) -> bool:
        return bool(self.by_digest)

    def find(self, key: str) -> Caller | None:
        """Who shows this key. Every digest is compared, and whole: the time tells nothing of any key."""
        shown = hashlib.sha256(key.encode()).digest()
        found = [caller for digest, caller in self.by_digest.items() if hmac.compare_digest(digest, shown)]
        return found[0] if found else None


def _caller(name: str, key: ApiKey) -> Caller:
    salt = f"key {name}" if key.cache_salt is None else f"salt {key.cache_salt}"
    return Caller(name, key.max_sessions, key.max_tokens, salt)


def _both(salt: str, asked: str) -> str:
    """One salt of a key's and a request's, which tells of neither and is no longer than one may be."""
    return hashlib.sha256(f"{salt}\n{asked}".encode()).hexdigest()
