"""Creates synthetic rows that teach a draft to copy: spans that occur twice.

Summaries, corrections and code often repeat earlier text, but a small draft does not learn to copy from ordinary
answers alone. Only copying predicts these rows: the label is the token after the first occurrence, and only repeated
positions count in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from chunks import Example

KIND = "copying"


@dataclass(frozen=True)
class CopyConfig:
    """Proportions and lengths of the rows."""

    random_share: float = 0.1  # share of rows with random tokens; the others repeat real text
    edit_rate: float = 0.06  # share of repeated tokens with an edit: replacement, deletion or insertion
    shortest: int = 4  # tokens per span
    longest: int = 48
    row: int = 128  # maximum tokens per row after the opening
    vocabulary: int = 8192  # distinct tokens in random rows


class CopyRows:
    """Draws rows from random tokens or from the text of `texts`."""

    def __init__(self, config: CopyConfig, opening: np.ndarray, texts: Sequence[Example], seed: int) -> None:
        self._config = config
        self._opening = opening
        self._texts = texts
        self._rng = np.random.default_rng(seed)
        counts = np.bincount(np.concatenate([e.tokens for e in texts]))
        self._pool = np.argsort(-counts)[: config.vocabulary]

    def draw(self) -> Example:
        """Draws a row of spans and their later repetitions, in random order and separated by random tokens."""
        rng = self._rng
        config = self._config
        is_random = rng.random() < config.random_share
        tokens = list(self._opening)
        labelled = list[int]()
        spans = [self._span(is_random) for _ in range(rng.integers(1, 4))]
        for span in spans:
            tokens.extend(span)
            tokens.extend(self._between())
        limit = len(self._opening) + config.row
        while len(tokens) < limit:
            before = len(tokens)
            self._repeat(spans[rng.integers(len(spans))], tokens, labelled)
            tokens.extend(self._between())
            if len(tokens) == before:
                break
        tokens = tokens[:limit]
        scored = np.array([i for i in labelled if i + 1 < limit], np.int32)
        row = np.array(tokens, np.int64)
        return Example(KIND, row, 0, scored, row[scored + 1][:, None], np.ones((scored.size, 1), np.float32))

    def _span(self, is_random: bool) -> list[int]:
        rng = self._rng
        config = self._config
        length = int(rng.integers(config.shortest, config.longest + 1))
        if is_random:
            return [int(t) for t in rng.choice(self._pool, length)]
        text = self._texts[int(rng.integers(len(self._texts)))].tokens[len(self._opening) :]
        start = int(rng.integers(max(1, text.size - length)))
        return [int(t) for t in text[start : start + length]]

    def _between(self) -> list[int]:
        return [int(t) for t in self._rng.choice(self._pool, self._rng.integers(0, 5))]

    def _repeat(self, span: list[int], tokens: list[int], labelled: list[int]) -> None:
        """Appends the span, or its tail, with edits; its first token and tokens after an edit are not labels."""
        rng = self._rng
        start = int(rng.integers(0, max(1, len(span) // 2))) if rng.random() < 0.3 else 0
        edited = True
        for token in span[start:]:
            if rng.random() < self._config.edit_rate:
                edited = True
                if rng.random() < 0.7:  # otherwise a deletion
                    tokens.append(int(rng.choice(self._pool)))
                if rng.random() < 0.6:
                    continue
            if not edited:
                labelled.append(len(tokens) - 1)
            tokens.append(token)
            edited = False
