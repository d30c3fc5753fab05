"""Checks at load that a row of a step has the same logits, bit by bit, whatever else runs in the step.

The same texts are computed token by token, each alone, then in prompt chunks of another size, in blocks, with other
rows, on other pages, and as paths of trees. Rounding depends on the shapes of operations and not on their numbers, so
random tokens of the served model show which shapes round differently.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.engine.runner import Runner

LENGTHS = (601, 237, 45)  # tokens of prompts: beyond a block of keys, a fraction of a block, and a few
CHUNKS = (512, 103)  # tokens per chunk of a prompt, in the first and the second computation
TAIL = 5  # tokens after each prompt, whose logits are compared
OTHERS = 13  # other rows of one token in the step
FILL = 7  # token of rows that do not matter


class InvarianceCheck:
    """Computes random texts of up to `context` tokens in several ways with a runner; overwrites its first pages."""

    def __init__(self, runner: Runner, page_size: int, pages: int, context: int, trees: bool) -> None:
        self._runner = runner
        self._page_size = page_size
        self._trees = trees
        room = pages // (2 * len(LENGTHS))  # pages of each text, twice
        self._longest = min(room * page_size, context) - 2 * TAIL  # a tree has two nodes for each token
        rng = Random(0)
        self._prompts = [self._tokens(rng, min(length, self._longest)) for length in LENGTHS]
        self._tails = [self._tokens(rng, TAIL) for _ in LENGTHS]
        tables = [tuple(range(first * room, (first + 1) * room)) for first in range(2 * len(LENGTHS))]
        self._tables = tables[: len(LENGTHS)]
        self._other_tables = [tuple(reversed(table)) for table in tables[len(LENGTHS) :]]

    def fault(self) -> str:
        """Describes the first dependence found; empty if there is none."""
        if self._longest < OTHERS:
            return "the cache or model.max_context is too small for the check"
        alone = [self._alone(*text) for text in zip(self._prompts, self._tails, self._tables, strict=True)]
        ways = {"in a block with other rows": self._together}
        if self._trees:
            ways["in a tree"] = self._as_trees
        for name, compute in ways.items():
            for prompt, expected, logits in zip(self._prompts, alone, compute(), strict=True):
                if not torch.equal(expected, logits):
                    return f"logits differ {name} after {len(prompt)} tokens"
        return ""

    def _tokens(self, rng: Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(self._runner.vocabulary) for _ in range(count))

    def _row(
        self, tokens: tuple[int, ...], start: int, table: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> InputRow:
        pages = table[: -(-(start + len(tokens)) // self._page_size)]
        return InputRow(tokens, start, len(tokens), pages, parents)

    def _logits(self, rows: Sequence[InputRow]) -> list[Tensor]:
        """Returns the logits of each row's tokens, copied, since captured steps overwrite them."""
        logits = self._runner.forward(rows).logits.clone()
        return list(torch.split(logits, [row.logits for row in rows]))

    def _alone(self, prompt: tuple[int, ...], tail: tuple[int, ...], table: tuple[int, ...]) -> Tensor:
        self._feed([prompt], [table], CHUNKS[0])
        steps = [self._logits([self._row((token,), len(prompt) + at, table)]) for at, token in enumerate(tail)]
        return torch.cat([logits for (logits,) in steps])

    def _feed(self, prompts: Sequence[tuple[int, ...]], tables: Sequence[tuple[int, ...]], chunk: int) -> None:
        for start in range(0, max(map(len, prompts)), chunk):
            rows = [
                replace(self._row(prompt[start : start + chunk], start, table), logits=1)
                for prompt, table in zip(prompts, tables, strict=True)
                if start < len(prompt)
            ]
            self._runner.forward(rows)

    def _together(self) -> list[Tensor]:
        self._feed(self._prompts, self._other_tables, CHUNKS[1])
        rows = [
            self._row(tail, len(prompt), table)
            for prompt, tail, table in zip(self._prompts, self._tails, self._other_tables, strict=True)
        ]
        others = [self._row((FILL,), at, self._tables[0]) for at in range(OTHERS)]
        return self._logits([*others, *rows])[OTHERS:]

    def _as_trees(self) -> list[Tensor]:
        """Feeds each tail as the path of every second node, among nodes that are rejected; requires `_together`."""
        parents = tuple(parent for at in range(TAIL) for parent in (2 * at - 1, 2 * at - 1))
        rows = [
            self._row(tuple(t for token in tail for t in (FILL, token)), len(prompt), table, parents)
            for prompt, tail, table in zip(self._prompts, self._tails, self._other_tables, strict=True)
        ]
        return [logits[1::2] for logits in self._logits(rows)]
