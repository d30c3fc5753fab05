"""Reads tokenizers for translation between a target and a draft."""

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from actors.grammars import grammar_vocabulary
from actors.models.config_reader import one_line
from actors.models.tokenizer_reader import load_tokenizer
from cluster.drafting.translation import TextTokens
from cluster.errors import ModelError

MARK = "\x01"  # never part of a longer token; written before a text if the tokenizer changes beginnings of texts


def load_text_tokens(folder: Path) -> TextTokens:
    """Loads a checkpoint's tokenizer. Raises ModelError if the bytes of its tokens are unknown."""
    tokenizer = load_tokenizer(folder)
    try:
        return text_tokens(tokenizer)
    except ModelError as error:
        raise ModelError(
            f"drafts cannot be translated with the tokenizer in {folder}, because the bytes of its tokens are unknown;"
            f" use a draft with the target's tokenizer, or method ngram or suffix: {one_line(error.__cause__ or error)}"
        ) from error


def text_tokens(tokenizer: Any) -> TextTokens:
    """Converts a Hugging Face tokenizer."""
    vocabulary = grammar_vocabulary(tokenizer, [0])
    special = set(tokenizer.all_special_ids)
    names: dict[str, int] = tokenizer.get_vocab()
    controls = {name: token for name, token in names.items() if token in special or vocabulary.is_special_token(token)}
    silent = set(controls.values())
    pieces = [
        b"" if token in silent or vocabulary.is_special_token(token) else vocabulary.decode_bytes([token])
        for token in range(vocabulary.vocab_size)
    ]
    return TextTokens(pieces, _encoder(tokenizer, pieces), _start(tokenizer), controls)


def _encoder(tokenizer: Any, pieces: Sequence[bytes]) -> Callable[[str], Sequence[int]]:
    """Returns a function that tokenizes text as the middle of a longer text, without control tokens."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # a control token's name in a text is text

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    if b"".join(pieces[token] for token in encode("a")) == b"a":
        return encode
    mark = encode(MARK)

    def encode_after_mark(text: str) -> Sequence[int]:
        ids = encode(MARK + text)
        return ids[len(mark) :] if ids[: len(mark)] == mark else encode(text)

    return encode_after_mark


def _start(tokenizer: Any) -> tuple[int, ...]:
    """Returns the control tokens that the tokenizer writes before a text."""
    empty: list[int] = tokenizer("")["input_ids"]
    return tuple(empty[:1]) if empty and empty[0] == tokenizer.bos_token_id else ()
