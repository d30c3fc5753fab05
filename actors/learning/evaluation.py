"""Scores a draft on examples, teacher-forced: which of its predictions are the target's own tokens.

Under greedy decoding these scores are close to what serving shows, at a small part of the cost. Exact is: the draft's
first choice at each position after the target's own text, with the tokens that the draft may propose; and that a block
ends at its first wrong token, so predictions after right ones are those that serving makes. Approximate is:

* Serving computes in the checkpoint's type or in 8 bits; this is float32, which decides near-ties otherwise.
* Prompts are cut from the left and long answers are cut into parts (`RowLimits`). No block crosses from a part to the
  next.
* A block has `draft_tokens` tokens: one forward predicts the first, a recurrent head the next `tokens_per_forward` - 1,
  then comes another forward. Serving adapts the length, and its trees and drafting ahead accept more.
* For sampled answers, a draft is helped by the target's noise in serving. Here its first choice counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actors.learning.trainable import (
    Pass,
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
    """Does not pause."""


def score_draft(
    draft: Path,
    examples: Sequence[Example],
    draft_tokens: int,
    *,
    limits: RowLimits = LIMITS,
    device: torch.device = CPU,
    pause: Callable[[], None] = do_nothing,
) -> list[SessionScore]:
    """Scores a draft checkpoint with blocks of `draft_tokens` tokens; one score per example, in order.

    `pause` is called between forwards. An example without an answer scores 0 of 0 tokens. Raises ModelError if the
    draft cannot be loaded or lacks a token of the examples.
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
    """Scores a loaded draft as `score_draft` does."""
    cut = draft.rows(examples, limits)
    rows = [row for own in cut for row in own]
    matches: dict[int, list[list[bool]]] = {}  # by row
    for group in grouped(rows, pass_tokens):
        pause()
        found = matches_of(draft, collate([rows[index] for index in group], draft.device))
        matches |= zip(group, found, strict=True)
    scores = []
    first = 0
    for example, own in zip(examples, cut, strict=True):
        of_example = [matches[index] for index in range(first, first + len(own))]
        first += len(own)
        lost = len(example.answer) - sum(row.predicted for row in own)  # the first token of a text without a prompt
        columns = [sum(column, [False] * lost) for column in zip(*of_example, strict=True)] or [[False] * lost]
        scores.append(score(columns[0], draft_tokens, columns[1:]))
    return scores


@torch.no_grad()
def matches_of(draft: TrainableDraft, batch: Pass) -> list[list[list[bool]]]:
    """Returns for each row which predictions are right: by distance from the forward, then by position.

    The recurrent head is asked only where all predictions before are right; elsewhere its own do not matter, and count
    as wrong.
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
    by_row = [_split(column, batch.sizes) for column in found]
    return [[rows[index] for rows in by_row] for index in range(len(batch.sizes))]


def _split(matched: Tensor, sizes: Sequence[int]) -> list[list[bool]]:
    return [part.tolist() for part in torch.split(matched, list(sizes))]
