"""The vocabulary as grammars see it: the bytes that each token stands for, and which tokens end a text."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from cluster.errors import ModelError


def load_grammar_vocabulary(folder: Path) -> LLTokenizer:
    """Of the checkpoint in this folder. Takes a second, or several of a large vocabulary.

    Raises ModelError where grammars cannot be kept to: no token ends a text, or tokens are of another library.
    """
    return grammar_vocabulary(AutoTokenizer.from_pretrained(folder), end_ids(str(folder)))


def grammar_vocabulary(tokenizer: Any, ends: Sequence[int]) -> LLTokenizer:
    """Of a Hugging Face tokenizer, with the ids of the tokens that end a text."""
    if not ends:
        raise ModelError("no token of this model ends a text, expected one for a grammar to end with")
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} has no tokens of the tokenizers library, which grammars need")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return LLTokenizer(backend.to_str(), n_vocab=len(tokenizer), eos_token=list(ends))


def end_ids(model: str) -> tuple[int, ...]:
    """Every token id that ends a generation: several are usual, and few models without a generation config exist."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        found = AutoConfig.from_pretrained(model).eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
