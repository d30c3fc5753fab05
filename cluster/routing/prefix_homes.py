"""Which target has computed which beginnings of texts, as far as one router remembers.

A target shares pages of its cache between sessions that begin with the same tokens, so a conversation's next turn is
read fastest where its last one was. Each router remembers what it has sent itself; they need not agree, for a wrong
memory costs a prefill and no more. Hashes are of whole pages, each of the page and all before it, and keyed, so that no
client can choose prompts that collide.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.page_allocator import page_hash

MOST_PAGES = 4096  # of a text that are looked at; the rest follows the beginning
TOKENS_A_SESSION = 128  # that are found in a cache outweigh one session more


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """How much a router remembers, and how far it lets targets' loads differ for it."""

    page_size: int = 16  # of the targets' caches
    most_sessions: float = 4.0  # by which a target may be ahead of the least loaded one
    pages_a_target: int = 1 << 15  # that are remembered, the latest


def page_keys(key: bytes, tokens: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """One for each whole page that a target may share: never the last token, which it computes in any case.

    Targets share pages among sessions of the same salt alone.
    """
    keys: list[bytes] = []
    parent = salt
    for start in range(0, min(len(tokens) - 1, MOST_PAGES * page_size) - page_size + 1, page_size):
        parent = page_hash(key, parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys


class PrefixHomes:
    """The memory of one router."""

    def __init__(self, key: bytes, options: PrefixOptions) -> None:
        self._key = key
        self._options = options
        self._pages: dict[str, OrderedDict[bytes, None]] = {}  # by target, the ones used longest ago first

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """Of a text's pages, as the other methods take them."""
        return page_keys(self._key, tokens, self._options.page_size, salt)

    def found(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Tokens of a text that each target is likely to have, of those that have any."""
        found = {}
        for target, pages in self._pages.items():
            count = next((index for index, key in enumerate(keys) if key not in pages), len(keys))
            if count:
                found[target] = count * self._options.page_size
        return found

    def worth(self, keys: Sequence[bytes]) -> dict[str, float]:
        """The same in sessions: how many more a target may have than another and still be the better one.

        Whoever has the most is worth no more than is allowed; others are behind it by what they lack, so that one that
        has the common beginning of many texts does not count as one that has the whole text.
        """
        found = self.found(keys)
        best = max(found.values(), default=0)
        most = min(best / TOKENS_A_SESSION, self._options.most_sessions)
        behind = {target: (best - tokens) / TOKENS_A_SESSION for target, tokens in found.items()}
        return {target: most - lacking for target, lacking in behind.items() if lacking < most}

    def computed(self, target: str, keys: Sequence[bytes]) -> None:
        """A target has these pages now, or soon."""
        pages = self._pages.setdefault(target, OrderedDict())
        for key in reversed(keys):  # the first page is the latest: a text is forgotten from its end
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > self._options.pages_a_target:
            pages.popitem(last=False)

    def forget(self, target: str) -> None:
        """It is gone, and its cache with it."""
        self._pages.pop(target, None)
