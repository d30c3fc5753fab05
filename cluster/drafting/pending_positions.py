"""A drafter's predictions for places that the target has not decided yet, kept until it decides."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

Place = tuple[int, tuple[int, ...]]
"""Number of decided tokens, and the tokens assumed to follow them."""

T = TypeVar("T")


class OpenPlaces(Generic[T]):
    """Predictions by session and place."""

    def __init__(self) -> None:
        self._open: defaultdict[str, dict[Place, T]] = defaultdict(dict)

    def note(self, session: str, place: Place, thought: T) -> None:
        """Stores a prediction; replaces an earlier one for the same place."""
        self._open[session][place] = thought

    def decided(self, session: str, tokens: Sequence[int]) -> list[tuple[T, int]]:
        """Returns the predictions for places that are now decided, each with the token decided there.

        `tokens` is the session's whole decided text. Predictions whose path the text contradicts are forgotten.
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
