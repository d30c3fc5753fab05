"""Loads a checkpoint's tokenizer, and refuses one that cannot be served in one line with a remedy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.models.config_reader import one_line
from cluster.errors import ModelError

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a checkpoint brings a tokenizer of its own."""
    return any((folder / name).is_file() for name in FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer of the tokenizers library. Raises ModelError when the folder holds none that can be served."""
    folder = Path(folder)
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(FILES[:3])}, ...); copy the tokenizer's files from the original"
            " checkpoint"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {_reason(error)}; fetch its files again, or write a"
            " tokenizer.json with save_pretrained()"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which has no fast version (tokenizer.json);"
            " use a checkpoint with a tokenizer.json"
        )
    backend = tokenizer.backend_tokenizer
    if backend.decoder is None and not isinstance(backend.model, models.WordLevel):  # whole words need none
        raise ModelError(
            f"the tokenizer in {folder} has no decoder and cannot turn tokens into text; add the decoder to its"
            " tokenizer.json, as in the original checkpoint"
        )
    return tokenizer


def id_limit(tokenizer: Any) -> int:
    """Returns the highest token id plus 1: ids may have gaps, so that the number of tokens is no bound."""
    ids: Mapping[str, int] = tokenizer.get_vocab()
    return max(ids.values()) + 1


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):  # advice that nobody can follow here
        return "it needs Python code of its own (auto_map in tokenizer_config.json), which is never run here"
    text = one_line(error)
    return text if isinstance(error, OSError | ImportError | ValueError) else f"{type(error).__name__}: {text}"
