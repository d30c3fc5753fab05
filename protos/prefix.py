"""Token sequence with the rolling hash of each of its prefixes.

Blocks and verdicts are addressed by length and hash of all tokens before them, so a message for another history can
never be applied.
"""

from array import array
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15 * 0xBF58476D1CE4E5B9 & _MASK


def extend_hash(state: int, token: int) -> int:
    """Returns the hash of a prefix extended by one token: splitmix64's finalizer over the state and the token."""
    return hashes_after(state, (token,))[0]


def hashes_after(state: int, tokens: Iterable[int]) -> list[int]:
    """Returns the hashes after each of `tokens`, in one call, because every process hashes every token."""
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
    """Tokens with their prefix hashes.

    `key` is drawn per session, so that no client can choose prompts whose hashes collide.
    """

    __slots__ = ("_hashes", "hash", "length", "tokens")

    def __init__(self, key: int, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.length = 0  # number of tokens in the prefix
        self.hash = extend_hash(key & _MASK, 0)  # hash of all tokens
        # _hashes[n] covers the first n tokens. An array: as int objects they would dominate a session's memory.
        self._hashes = array("Q", (self.hash,))
        self.extend(tokens)

    def __len__(self) -> int:
        return self.length

    def hash_at(self, length: int) -> int | None:
        """Returns the hash over the first `length` tokens, or None if there are fewer."""
        return self._hashes[length] if 0 <= length <= self.length else None

    def matches(self, length: int, prefix_hash: int) -> bool:
        """Returns whether the first `length` tokens have this hash."""
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
        """Rolls back to the first `length` tokens."""
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]
        del self._hashes[length + 1 :]
        self.length = length
        self.hash = self._hashes[-1]
