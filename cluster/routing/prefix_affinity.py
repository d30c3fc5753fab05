"""One router's record of the prefixes that each target has computed.

A target shares pages of its cache between sessions that begin with the same tokens, so the next turn of a conversation
is prefilled fastest where the last one was. Each router records only what it sent itself. Routers need not agree,
because a wrong record costs only a prefill. Hashes cover whole pages, each with all pages before it, and are keyed, so
that no client can choose prompts that collide.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.page_allocator import page_hash

MOST_PAGES = 4096  # pages of a text that are hashed; its beginning is enough to place it
TOKENS_A_SESSION = 128  # cached tokens that outweigh one more session


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Size of a router's record, and its weight against load."""

    page_size: int = 16  # tokens per page of the targets' caches
    most_sessions: float = 4.0  # extra sessions that a target may have over the least loaded one
    pages_a_target: int = 1 << 15  # most recent pages recorded per target


def page_keys(key: bytes, tokens: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """Returns one key for each whole page that a target may share.

    The last token is never in one, because a target computes it in any case. Targets share pages only between sessions
    with the same salt.
    """
    keys: list[bytes] = []
    parent = salt
    for start in range(0, min(len(tokens) - 1, MOST_PAGES * page_size) - page_size + 1, page_size):
        parent = page_hash(key, parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys


class PrefixHomes:
    """The record of one router."""

    def __init__(self, key: bytes, options: PrefixOptions) -> None:
        self._key = key
        self._options = options
        self._pages: dict[str, OrderedDict[bytes, None]] = {}  # by target, least recently used first

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """Returns the keys of a text's pages, as the other methods take them."""
        return page_keys(self._key, tokens, self._options.page_size, salt)

    def found(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns, by target, the number of the text's tokens that it is likely to have cached.

        Targets without any are left out.
        """
        found = {}
        for target, pages in self._pages.items():
            count = next((index for index, key in enumerate(keys) if key not in pages), len(keys))
            if count:
                found[target] = count * self._options.page_size
        return found

    def worth(self, keys: Sequence[bytes]) -> dict[str, float]:
        """Returns, by target, the extra sessions that it may have and still be preferred for this text.

        The target with the longest cached prefix gets at most `most_sessions`. The others get less by what they lack,
        so a target with only the common beginning of many texts does not count like one with the whole text.
        """
        found = self.found(keys)
        best = max(found.values(), default=0)
        most = min(best / TOKENS_A_SESSION, self._options.most_sessions)
        behind = {target: (best - tokens) / TOKENS_A_SESSION for target, tokens in found.items()}
        return {target: most - lacking for target, lacking in behind.items() if lacking < most}

    def computed(self, target: str, keys: Sequence[bytes]) -> None:
        """Records that a target has these pages now or soon."""
        pages = self._pages.setdefault(target, OrderedDict())
        for key in reversed(keys):  # the first page becomes the most recent, so a text is dropped from its end
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > self._options.pages_a_target:
            pages.popitem(last=False)

    def forget(self, target: str) -> None:
        """Drops a target that is gone together with its cache."""
        self._pages.pop(target, None)
