"""Token sequence with a rolling hash of every prefix.

Blocks and verdicts carry the length and hash of all preceding tokens, so a message for a different text is never
applied.
"""

from array import array
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15 * 0xBF58476D1CE4E5B9 & _MASK


def extend_hash(state: int, token: int) -> int:
    """Returns the hash of a prefix extended by one token (the splitmix64 finalizer applied to state and token)."""
    return hashes_after(state, (token,))[0]


def hashes_after(state: int, tokens: Iterable[int]) -> list[int]:
    """Returns the hash after each of `tokens`; batched for speed, because every process hashes every token."""
    hashes = []
    mask = _MASK
    increment = _INCREMENT
    for token in tokens:
        x = (state ^ (token * 0xBF58476D1CE4E5B9 + increment)) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        state = x ^ (x >> 31)
        hashes.append(state)
    return hashes


class Prefix:
    """A token sequence with its prefix hashes.

    Each session draws its own `key`, so clients cannot construct colliding prompts.
    """

    __slots__ = ("_hashes", "hash", "length", "tokens")

    def __init__(self, key: int, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.length = 0  # number of tokens
        self.hash = extend_hash(key & _MASK, 0)  # hash of all tokens
        # _hashes[n] covers the first n tokens. An array, because int objects would dominate a session's memory.
        self._hashes = array("Q", (self.hash,))
        self.extend(tokens)

    def __len__(self) -> int:
        return self.length

    def hash_at(self, length: int) -> int | None:
        """Returns the hash of the first `length` tokens, or None if there are fewer."""
        return self._hashes[length] if 0 <= length <= self.length else None

    def matches(self, length: int, prefix_hash: int) -> bool:
        """Returns True if the first `length` tokens have this hash."""
        return 0 <= length <= self.length and self._hashes[length] == prefix_hash

    def append(self, token: int) -> None:
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        new = tuple(tokens)
        if not new:
            return
        hashes = hashes_after(self.hash, new)
        self.tokens += new
        self._hashes.extend(hashes)
        self.length = len(self.tokens)
        self.hash = hashes[-1]

    def truncate(self, length: int) -> None:
        """Truncates the sequence to its first `length` tokens."""
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]
        del self._hashes[length + 1 :]
        self.length = length
        self.hash = self._hashes[-1]
