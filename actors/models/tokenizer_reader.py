"""Loads a checkpoint's tokenizer and end-of-text ids. Every error is a single line with a fix."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.models.config_reader import CONFIG, embedding_rows, one_line, read_json
from cluster.errors import ModelError

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a checkpoint contains a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads a fast tokenizer. Raises ModelError if the tokenizer is missing or unsupported."""
    folder = Path(folder)
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(FILES[:3])}, ...); copy the tokenizer's files from the original"
            " checkpoint"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises only Exception
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
    if backend.decoder is None and not isinstance(
        backend.model, models.WordLevel
    ):  # a word-level tokenizer needs no decoder
        raise ModelError(
            f"the tokenizer in {folder} has no decoder and cannot turn tokens into text; add the decoder to its"
            " tokenizer.json, as in the original checkpoint"
        )
    return tokenizer


def id_limit(tokenizer: Any) -> int:
    """Returns the highest token id plus 1. Ids may have gaps, so there may be fewer tokens."""
    ids: Mapping[str, int] = tokenizer.get_vocab()
    return max(ids.values()) + 1


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):  # replaces transformers' advice, which does not apply
        return "it needs Python code of its own (auto_map in tokenizer_config.json), which is not run"
    text = one_line(error)
    return text if isinstance(error, OSError | ImportError | ValueError) else f"{type(error).__name__}: {text}"


GENERATION_CONFIG = "generation_config.json"
KEY = "eos_token_id"


@dataclass(frozen=True, slots=True)
class EndOfText:
    """The end-of-text ids and the file that lists them."""

    ids: tuple[int, ...]
    source: str  # empty if no file and no tokenizer has ids

    def __str__(self) -> str:
        if not self.ids:
            return f"no token ends a text: no {KEY} in {GENERATION_CONFIG} or {CONFIG}, and the tokenizer has none"
        ids = ", ".join(map(str, self.ids))
        return f"text ends with token {ids} ({self.source})"


def end_of_text(folder: Path) -> EndOfText:
    """Reads the ids from the first source that has any: generation_config.json, config.json, the tokenizer.

    A file with null, [], or only ids that the model cannot produce has none. Raises ModelError for a broken file.
    """
    folder = Path(folder)
    rows = embedding_rows(folder) if (folder / CONFIG).is_file() else None
    for source, value in _sources(folder):
        if ids := tuple(token for token in _ids(value, source, folder) if rows is None or token < rows):
            return EndOfText(ids, source)
    return EndOfText((), "")


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the end-of-text ids: often several, possibly none."""
    return end_of_text(folder).ids


def _sources(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in (GENERATION_CONFIG, CONFIG):
        if (folder / name).is_file():
            content = read_json(folder / name)
            yield name, content.get(KEY)
            text = content.get("text_config")
            if isinstance(text, dict):
                yield name, text.get(KEY)
    if has_tokenizer(folder):
        yield "tokenizer", load_tokenizer(folder).eos_token_id


def _ids(value: Any, source: str, folder: Path) -> tuple[int, ...]:
    """Parses token ids: a number, a quoted number, or a list of these."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [_id(item) for item in values]
    if None in ids:
        raise ModelError(f"{KEY} in {folder / source} is {value!r}; expected one token id or a list of them")
    return tuple(dict.fromkeys(number for number in ids if number is not None))


def _id(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
