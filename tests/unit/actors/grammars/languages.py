"""Vocabulary of a few multi-letter tokens, and languages small enough to enumerate."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

TOKENS = ("a", "b", "c", "ab", "ba", "abc", "bc", "cab", "<end>")
END = len(TOKENS) - 1
LETTERS = {token: index for index, token in enumerate(TOKENS)}


class _WordTokenizer:
    """The interface that `TokenizerWrapper` expects."""

    eos_token_id = END
    bos_token_id = None
    tokens = tuple(token.encode() for token in TOKENS)
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        letters = text if isinstance(text, str) else text.decode()
        return [LETTERS[letter] for letter in letters if letter in LETTERS]


def small_vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_WordTokenizer()), eos_token=[END])


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TOKENS[token] for token in tokens)


def allowed_by(language: Sequence[str], tokens: Sequence[int]) -> set[int] | None:
    """Returns the tokens that keep the text a prefix of a word or end a word; None if it already is no prefix."""
    text = text_of(tokens)
    if not any(word.startswith(text) for word in language):
        return None
    found = {token for token in range(END) if any(word.startswith(text + TOKENS[token]) for word in language)}
    return found | ({END} if text in language else set())


def agrees(mask: bytes | None, language: Sequence[str], tokens: Sequence[int]) -> bool:
    """Returns whether a mask equals the enumeration of all words; a forced string needs only one spelling."""
    found = tokens_in(mask)
    allowed = allowed_by(language, tokens)
    if found is None or allowed is None or END in allowed:
        return found == allowed
    letters = {TOKENS[token][0] for token in allowed}
    return found == allowed if len(letters) > 1 else bool(found) and found <= allowed


def tokens_in(mask: bytes | None) -> set[int] | None:
    if mask is None:
        return None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
