"""Scores a draft on examples, teacher-forced: counts the predictions that equal the target's own tokens.

Under greedy decoding these scores are close to acceptance in serving, at a small part of the cost. Two things are
exact: the draft's first choice at each position after the target's own text, among the tokens that the draft may
propose; and that a block ends at its first wrong token. Approximate are:

* Precision: serving computes in the checkpoint's dtype or in 8 bits; here it is float32, which may decide near-ties
  differently.
* Context: prompts are cut from the left and long answers are cut into parts (`RowLimits`). No block crosses from one
  part to the next.
* Block shape: a block has `draft_tokens` tokens: one forward predicts the first, a recurrent head the next
  `tokens_per_forward` - 1, then comes another forward. Serving adapts the length, and its trees and lookahead blocks
  get more tokens accepted.
* Sampling: in serving, the target's noise helps the draft predict sampled answers. Here only its first choice counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actors.learning.trainable import (
    Pass,
    Row,
    RowLimits,
    TrainableDraft,
    collate,
    first_choices,
    grouped,
    load_trainable,
)
from cluster.learning import Example, SessionScore, score

PASS_TOKENS = 1024
CPU = torch.device("cpu")
LIMITS = RowLimits()


def do_nothing() -> None:
    """Default for `pause`: returns at once."""


def score_draft(
    draft: Path,
    examples: Sequence[Example],
    draft_tokens: int,
    *,
    limits: RowLimits = LIMITS,
    device: torch.device = CPU,
    pause: Callable[[], None] = do_nothing,
) -> list[SessionScore]:
    """Scores a draft checkpoint with blocks of `draft_tokens` tokens; returns one score per example, in order.

    `pause` is called between forwards. An example without an answer scores 0 of 0 tokens. Raises ModelError if the
    draft cannot be loaded or its vocabulary lacks a token of the examples.
    """
    return score_loaded(load_trainable(draft, device), examples, draft_tokens, limits=limits, pause=pause)


def score_loaded(
    draft: TrainableDraft,
    examples: Sequence[Example],
    draft_tokens: int,
    *,
    limits: RowLimits = LIMITS,
    pass_tokens: int = PASS_TOKENS,
    pause: Callable[[], None] = do_nothing,
) -> list[SessionScore]:
    """Scores a loaded draft like `score_draft`."""
    return score_rows(
        draft.rows(examples, limits),
        [len(example.answer) for example in examples],
        lambda rows: matches_of(draft, collate(rows, draft.device)),
        draft_tokens,
        pass_tokens,
        pause,
    )


def score_rows(
    cut: Sequence[Sequence[Row]],  # rows by example
    # Number of tokens to count, by example; tokens that no row predicts come first and count as wrong.
    lengths: Sequence[int],
    matches_in: Callable[[Sequence[Row]], list[list[list[bool]]]],  # as `matches_of`
    draft_tokens: int,
    pass_tokens: int,
    pause: Callable[[], None],
) -> list[SessionScore]:
    """Scores examples by the matches in their rows."""
    rows = [row for own in cut for row in own]
    matches: dict[int, list[list[bool]]] = {}  # by index in `rows`
    for group in grouped(rows, pass_tokens):
        pause()
        matches |= zip(group, matches_in([rows[index] for index in group]), strict=True)
    scores = []
    first = 0
    for length, own in zip(lengths, cut, strict=True):
        of_example = [matches[index] for index in range(first, first + len(own))]
        first += len(own)
        lost = length - sum(row.predicted for row in own)
        columns = [sum(column, [False] * lost) for column in zip(*of_example, strict=True)] or [[False] * lost]
        scores.append(score(columns[0], draft_tokens, columns[1:]))
    return scores


@torch.no_grad()
def matches_of(draft: TrainableDraft, batch: Pass) -> list[list[list[bool]]]:
    """Returns for each row which predictions are correct: by distance from the forward, then by position.

    The recurrent head predicts only where all predictions before it are correct; its other predictions cannot be
    accepted and count as wrong.
    """
    states = draft.states(batch)
    weight = draft.lm_head
    columns = draft.column_of[batch.labels]
    found = [first_choices(states, weight) == columns]
    asked = found[0].nonzero()[:, 0]
    states = states[asked]
    for distance in range(1, draft.width):
        keep = batch.remaining[asked] >= distance
        asked, states = asked[keep], states[keep]
        states = draft.following(states, batch.labels[asked + distance - 1])
        is_right = first_choices(states, weight[: draft.head_columns]) == columns[asked + distance]
        asked, states = asked[is_right], states[is_right]
        matched = torch.zeros_like(found[0])
        matched[asked] = True
        found.append(matched)
    return by_row(found, batch.sizes)


def by_row(matched: Sequence[Tensor], sizes: Sequence[int]) -> list[list[list[bool]]]:
    """Splits matches, (positions,) for each distance, by row."""
    parts = [[part.tolist() for part in torch.split(column, list(sizes))] for column in matched]
    return [[rows[index] for rows in parts] for index in range(len(sizes))]
