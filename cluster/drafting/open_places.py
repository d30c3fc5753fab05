"""What a drafter thought of places that the target has yet to decide, until it is decided what came there."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

Place = tuple[int, tuple[int, ...]]
"""Tokens decided before, and those taken for granted after them."""

T = TypeVar("T")


class OpenPlaces(Generic[T]):
    """By session and place."""

    def __init__(self) -> None:
        self._open: defaultdict[str, dict[Place, T]] = defaultdict(dict)

    def note(self, session: str, place: Place, thought: T) -> None:
        """What was thought there last is kept."""
        self._open[session][place] = thought

    def decided(self, session: str, tokens: Sequence[int]) -> list[tuple[T, int]]:
        """The text is `tokens` up to here: what was thought where it has come to, and the token that came there.

        Places that it has passed by are forgotten.
        """
        found = []
        still_open = {}
        for (base_len, path), thought in self._open.pop(session, {}).items():
            end = base_len + len(path)
            known = tuple(tokens[base_len:end])
            if path[: len(known)] != known:
                continue
            if end < len(tokens):
                found.append((thought, tokens[end]))
            else:
                still_open[base_len, path] = thought
        if still_open:
            self._open[session] = still_open
        return found

    def close(self, session: str) -> None:
        self._open.pop(session, None)
