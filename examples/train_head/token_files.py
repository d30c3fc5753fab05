"""Files of token ids: `.npz` with an array `tokens`, (sequences, longest), padded at the end of each row."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ModelError

KEY = "tokens"

TokenIds = NDArray[np.int64]


def read_tokens(path: Path) -> list[TokenIds]:
    """Reads a file's sequences, each (length,). Raises ModelError if the file lacks a 2-D array `tokens`."""
    with np.load(path) as stored:
        if KEY not in stored.files or stored[KEY].ndim != 2:
            raise ModelError(f"{path} contains {stored.files}, expected an array {KEY} of shape (sequences, longest)")
        return [without_padding(row) for row in stored[KEY].astype(np.int64)]


def without_padding(row: TokenIds) -> TokenIds:
    """Removes padding, which repeats the last token; keeps the token's first occurrence."""
    others = np.flatnonzero(row != row[-1])
    end = int(others[-1]) + 2 if len(others) else 1
    return row[:end]


def write_tokens(path: Path, sequences: Sequence[Sequence[int]]) -> None:
    """Writes the file atomically; pads rows with their last token."""
    longest = max(map(len, sequences))
    rows = [[*sequence, *[sequence[-1]] * (longest - len(sequence))] for sequence in sequences]
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez_compressed(unfinished, tokens=np.array(rows, dtype=np.uint32))
    unfinished.replace(path)


def common_opening(sequences: Sequence[TokenIds]) -> int:
    """Returns the length of the sequences' common prefix, such as a system prompt."""
    shortest = min(map(len, sequences))
    rows = np.stack([sequence[:shortest] for sequence in sequences])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest
