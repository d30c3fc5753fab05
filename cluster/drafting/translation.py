"""Translates token ids between a target and a draft with different tokenizers, through the bytes of their tokens.

`TranslatedText` keeps the draft's tokenization of a session's committed text. New target tokens change only its end:
the last few tokens are tokenized again together with the new text, and everything up to the first difference stays, so
that the draft's cache stays valid. In the other direction, drafted tokens become text, which the target's tokenizer
reads together with the target's last tokens. If its tokens do not end where the committed text ends, the drafted text
is tokenized alone. String-level translation for drafts is due to Timor et al. 2025 (arXiv 2502.05202).

Translations affect only which tokens are drafted, so a bad one costs only speed. Pure.
"""

from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from protos.prefix import Prefix

WINDOW_TOKENS = 8  # draft tokens at the end of a text to tokenize again
CONTEXT_TOKENS = 4  # target tokens that the target's tokenizer reads before drafted text


@dataclass(frozen=True, eq=False)
class TextTokens:
    """A tokenizer. Control tokens and ids without a token have empty pieces."""

    pieces: Sequence[bytes]  # bytes by token id
    encode: Callable[[str], Sequence[int]]  # never returns control tokens
    start: tuple[int, ...] = ()  # control tokens before every text
    controls: Mapping[str, int] = field(default_factory=dict)  # control tokens by name

    def piece(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def below(self, limit: int) -> "TextTokens":
        """Returns the tokens with ids below `limit`; `encode` may still return others."""
        controls = {name: token for name, token in self.controls.items() if token < limit}
        start = tuple(token for token in self.start if token < limit)
        return replace(self, pieces=self.pieces[:limit], start=start, controls=controls)


@dataclass(eq=False)
class Translator:
    """Translates between two tokenizers."""

    target: TextTokens
    draft: TextTokens
    encoded: int = 0  # ids produced by the tokenizers so far, a measure of the cost
    _widths: dict[int, int] = field(default_factory=dict)

    @cached_property
    def controls(self) -> Mapping[int, int]:
        """Maps control tokens of the target to those of the same name in the draft, except text-start tokens."""
        named = {token: self.draft.controls.get(name) for name, token in self.target.controls.items()}
        return {token: own for token, own in named.items() if own is not None and own not in self.draft.start}

    def draft_ids(self, text: str) -> Sequence[int]:
        """Tokenizes text with the draft's tokenizer; omits ids without a piece."""
        ids = [token for token in self.draft.encode(text) if token < len(self.draft.pieces)]
        self.encoded += len(ids)
        return ids

    def target_ids(self, text: str) -> Sequence[int]:
        """Tokenizes text with the target's tokenizer."""
        ids = self.target.encode(text)
        self.encoded += len(ids)
        return ids

    def width(self, token: int) -> int:
        """Returns the number of target tokens in a draft token's text; at least 1."""
        if token not in self._widths:
            text = self.draft.piece(token).decode(errors="ignore")
            self._widths[token] = max(1, len(self.target.encode(text)))
        return self._widths[token]

    def shared_ids(self) -> list[int]:
        """Returns, for each draft token, the target token with the same bytes; -1 if there is none."""
        by_piece = {piece: token for token, piece in reversed([*enumerate(self.target.pieces)]) if piece}
        return [by_piece.get(piece, -1) if piece else -1 for piece in self.draft.pieces]


@dataclass(eq=False)
class TranslatedText:
    """A session's committed text, with the draft's tokenization in `prefix`.

    The draft's tokens stop before `required`, committed bytes that do not form a complete character yet. Drafted tokens
    must begin with these bytes.
    """

    translator: Translator
    prefix: Prefix
    required: bytes = b""
    target_len: int = 0  # target tokens
    _text: bytearray = field(default_factory=bytearray)
    _ends: list[int] = field(default_factory=list)  # end of each draft token, in bytes
    _fixed: int = 0  # draft tokens that are never tokenized again
    _target_starts: list[int] = field(default_factory=list)  # of target tokens since the last control token, in bytes

    @classmethod
    def begin(
        cls,
        translator: Translator,
        hash_key: int,
        tokens: Sequence[int],
        prompt_len: int = 0,
        draft_prompt: Sequence[int] = (),
    ) -> "TranslatedText":
        """Returns the translation of a session's first tokens.

        `draft_prompt` replaces the translation of the first `prompt_len` tokens, unless it contains an unknown token.
        """
        text = cls(translator, Prefix(hash_key))
        is_replaced = bool(draft_prompt) and max(draft_prompt) < len(translator.draft.pieces)
        for token in draft_prompt if is_replaced else translator.draft.start:
            text._add_fixed(token)
        text.target_len = prompt_len if is_replaced else 0
        text.extend(tokens[text.target_len :])
        return text

    def extend(self, tokens: Sequence[int]) -> int:
        """Appends committed target tokens; returns how many of the earlier draft tokens are still valid."""
        kept = self.prefix.length
        self.target_len += len(tokens)
        for token in tokens:
            if piece := self.translator.target.piece(token):
                self._target_starts.append(len(self._text))
                self._text += piece
            else:
                kept = min(kept, self._tokenize())
                self._target_starts.clear()
                if token in self.translator.controls:
                    self._add_fixed(self.translator.controls[token])
                self._fixed = self.prefix.length
                self.required = b""
        return min(kept, self._tokenize())

    def translated(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the target tokens of drafted tokens, each with the index of the drafted token that completes it.

        Ends before control tokens, incomplete characters and text that the target's tokenizer changes.
        """
        pieces = []
        for token in drafted:
            if not (piece := self.translator.draft.piece(token)):
                break
            pieces.append(piece)
        text = b"".join(pieces)
        if not text.startswith(self.required) or len(text) == len(self.required):
            return []
        ends = [end - len(self.required) for end in accumulate(map(len, pieces))]
        found = []
        reached = 0
        for token, end in self._target_tokens(text[len(self.required) :]):
            reached = bisect_left(ends, end, reached)
            found.append((token, reached))
        return found

    def _target_tokens(self, new: bytes) -> list[tuple[int, int]]:
        """Returns the target tokens of new text after the committed text, with their ends in bytes."""
        starts = self._target_starts[-CONTEXT_TOKENS:]
        context = bytes(self._text[starts[0] :]) if starts else b""
        found = self._tokens_after(context, new)
        if found is None and not self.required:
            found = self._tokens_after(b"", new)
        return found or []

    def _tokens_after(self, context: bytes, new: bytes) -> list[tuple[int, int]] | None:
        """Returns the target tokens of `new`, with their ends; None if a token crosses the end of `context`."""
        while context and context[0] & 0xC0 == 0x80:  # the first token begins inside a character
            context = context[1:]
        text, _ = decoded(context + new)
        whole = context + new
        at = 0
        found = []
        for token in self.translator.target_ids(text):
            end = at + len(self.translator.target.piece(token))
            is_changed = end == at or whole[at:end] != self.translator.target.piece(token)
            if at < len(context) and (is_changed or end > len(context)):
                return None
            if is_changed:
                break
            if at >= len(context):
                found.append((token, end - len(context)))
            at = end
        return found

    def _tokenize(self) -> int:
        """Tokenizes the end of the text again; returns how many draft tokens stay."""
        prefix = self.prefix
        start = prefix.length
        found: Sequence[int] = ()
        text = ""
        begin = 0
        while True:
            start = max(self._fixed, start - WINDOW_TOKENS)
            begin = self._ends[start - 1] if start else 0
            if start > self._fixed and begin < len(self._text) and self._text[begin] & 0xC0 == 0x80:
                continue  # inside a character
            text, self.required = decoded(bytes(self._text[begin:]))
            found = self.translator.draft_ids(text)
            if start == self._fixed or (found and found[0] == prefix.tokens[start]):
                break
        same = 0
        for one, other in zip(found, prefix.tokens[start:], strict=False):
            if one != other:
                break
            same += 1
        kept = start + same
        prefix.truncate(kept)
        prefix.extend(found[same:])
        pieces = [self.translator.draft.piece(token) for token in found]
        end = len(self._text) - len(self.required)
        if b"".join(pieces) == self._text[begin:end]:
            self._ends[start:] = [begin + length for length in accumulate(map(len, pieces))]
        else:  # the tokenizer changes this text: the places of its tokens are unknown
            self._ends[start:] = [end] * len(found)
            self._fixed = prefix.length
        return kept

    def _add_fixed(self, token: int) -> None:
        self.prefix.extend((token,))
        self._ends.append(len(self._text))
        self._fixed = self.prefix.length


def decoded(text: bytes) -> tuple[str, bytes]:
    """Returns the text without invalid bytes, and the bytes of an incomplete last character."""
    decoder = getincrementaldecoder("utf-8")(errors="ignore")
    complete = decoder.decode(text)
    return complete, decoder.getstate()[0]
