"""Prompt lookup where the text repeats itself, the draft model elsewhere.

Summaries, rewriting and code repeat their text, and a lookup costs nothing; elsewhere the model knows better. Which of
the two drafts depends on tokens before the block alone, so ratio acceptance stays exact.
"""

from collections.abc import Callable, Sequence

from actors.methods import loading, prompt_lookup
from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import Proposal, Want


def create(draft: DraftPool, setup: DraftSetup) -> "LookupFirst":
    return LookupFirst(prompt_lookup.create(draft, setup), loading.create(draft, setup))


class LookupFirst:
    """Two methods as one: `model` drafts what `lookup` has nothing to offer for."""

    def __init__(self, lookup: DraftingMethod, model: DraftingMethod) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def tokens_per_forward(self) -> int:
        return self._model.tokens_per_forward

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        found = [proposal for proposal in self._lookup.propose(wants, interrupted) if proposal.tokens]
        served = {proposal.session for proposal in found}
        rest = [want for want in wants if want.open.session not in served]
        return found + (self._model.propose(rest, interrupted, early) if rest else [])

    def close(self, sessions: Sequence[str]) -> None:
        self._lookup.close(sessions)
        self._model.close(sessions)
