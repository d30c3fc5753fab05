"""The vocabulary as grammars see it: the bytes that each token stands for, and which tokens end a text."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from actors.models.config_reader import one_line
from actors.models.end_of_text import end_ids as end_ids
from actors.models.tokenizer_reader import id_limit, load_tokenizer
from cluster.errors import ModelError


def load_grammar_vocabulary(folder: Path) -> LLTokenizer:
    """Of the checkpoint in this folder. Takes a second, or several of a large vocabulary.

    Raises ModelError where grammars cannot be kept to: no token ends a text, or tokens are of another library.
    """
    return grammar_vocabulary(load_tokenizer(folder), end_ids(folder))


def grammar_vocabulary(tokenizer: Any, ends: Sequence[int]) -> LLTokenizer:
    """Of a Hugging Face tokenizer, with the ids of the tokens that end a text."""
    if not ends:
        raise ModelError(
            "the model has no end-of-text token, and grammars need one; add eos_token_id to generation_config.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} has no tokens of the tokenizers library, which grammars need")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=id_limit(tokenizer), eos_token=list(ends))
    except ValueError as error:
        raise ModelError(f"grammars cannot be kept to with this tokenizer: {one_line(error)}") from error
