"""Chunk files: whole sequences, with the target's top next tokens at the scored positions.

`generate.py` and `score.py` write them, and `train.py` reads them. A complete file is renamed into place, so training
can read finished chunks while others are still being written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Example:
    """Sequence with the teacher's top next tokens at scored positions."""

    kind: str
    tokens: np.ndarray  # [length]
    answer_start: int
    scored: np.ndarray  # [positions]: indices whose next token the teacher predicts
    top_ids: np.ndarray  # [positions, k], likeliest first
    top_probs: np.ndarray  # [positions, k]


def write_chunk(path: Path, examples: list[Example]) -> None:
    """Writes `examples` to one file, atomically."""
    kinds = sorted({e.kind for e in examples})
    arrays = {
        "tokens": np.concatenate([e.tokens.astype(np.int32) for e in examples]),
        "lengths": np.array([e.tokens.size for e in examples], np.int32),
        "answer_starts": np.array([e.answer_start for e in examples], np.int32),
        "kinds": np.array([kinds.index(e.kind) for e in examples], np.int8),
        "kind_names": np.array(kinds),
        "scored": np.concatenate([e.scored.astype(np.int32) for e in examples]),
        "scored_lengths": np.array([e.scored.size for e in examples], np.int32),
        "top_ids": np.concatenate([e.top_ids.astype(np.uint32) for e in examples]),
        "top_probs": np.concatenate([e.top_probs.astype(np.float16) for e in examples]),
    }
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, path)


def read_chunk(path: Path) -> list[Example]:
    with np.load(path) as chunk:
        kinds = [str(chunk["kind_names"][index]) for index in chunk["kinds"]]
        tokens = np.split(chunk["tokens"], np.cumsum(chunk["lengths"])[:-1])
        ends = np.cumsum(chunk["scored_lengths"])[:-1]
        columns = (np.split(chunk[name], ends) for name in ("scored", "top_ids", "top_probs"))
        rows = zip(kinds, tokens, chunk["answer_starts"].tolist(), *columns, strict=True)
        return [Example(*row) for row in rows]
