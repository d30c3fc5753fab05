"""What a draft head is fed beside each token: the target's state before it, or the head's own in its place.

Token j of a text is fed with the state of position j - 1. The target's is the true one; where it is not there, the one
that the head itself predicted the token from is recycled. What was cached of recycled states is fed again once the true
ones are there (EAGLE's second pass over accepted tokens); to leave that out costs about a tenth of what is accepted.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.methods.model.cached_draft import CachedDraft
from actors.methods.model.draft_cache import Branch, DraftCache
from actors.methods.model.session_states import SessionStates
from protos.states import StatesNeeded


class FedStates:
    """The true states of all open sessions, for a head that takes `max_positions`.

    A session whose states begin in mid-text begins there for the head: the tokens up to that state are as the first of
    a text, which is not fed, and what comes after them has the positions of a text of its own.

    `project` makes of rows as they are sent, (n, width), those that the head is fed, (n, hidden). Mask tokens are fed
    with `mask_state`, (1, hidden).
    """

    def __init__(
        self,
        needs: StatesNeeded,
        project: Callable[[Tensor], Tensor],
        max_positions: int,
        mask_state: Tensor | None = None,
    ) -> None:
        self.needs = needs
        self._project = project
        self._max_positions = max_positions
        self._mask_state = mask_state
        self._sessions: dict[str, SessionStates] = {}

    def open(self, session: str) -> None:
        """What is known of a session that is open already stays."""
        self._sessions.setdefault(session, SessionStates())

    def begin(self, session: str, first: int) -> None:
        """No states of a session come of positions before the first; what is known of it is forgotten."""
        self._sessions[session] = SessionStates(first)

    def first_of(self, session: str) -> int:
        """Position that its states begin at."""
        return self._sessions[session].begin

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        for session in sessions:
            self._sessions.pop(session, None)

    def put(self, session: str, first: int, rows: Tensor) -> None:
        """True states of the positions from `first` on, (n, width); those of an unknown session are ignored."""
        known = self._sessions.get(session)
        if known is None or known.missing_from(first) >= first + len(rows):
            return
        assert rows.shape[-1] == self.needs.width, f"rows have {rows.shape[-1]} elements, not {self.needs.width}"
        known.put(first, self._project(rows))

    def rewind(self, cache: DraftCache, branch: Branch) -> None:
        """Cuts a branch to before the first token that was fed with a recycled state, if the true one is there now.

        What the head predicted is kept: the tokens may be fed with it again, where true states are still missing.
        """
        if 0 < branch.exact < len(branch.tokens) and branch.exact - 1 in self._sessions[branch.session]:
            cache.cut(branch, branch.exact)

    def feedable(self, draft: CachedDraft, tokens: int) -> int:
        """How many of the first so many of its pending tokens can be fed now.

        None where what is pending goes beyond the head's positions, or the text is its first token alone, before which
        there is no state.
        """
        branch = draft.branch
        start = len(branch.tokens)
        places = start + len(draft.pending) - 1 - branch.first
        if places > self._max_positions or draft.request.base_len <= branch.first + 1:
            return 0
        end = min(start + tokens, self._exact_to(branch, start))
        while end < start + tokens and (end in branch.predicted or end - 1 in self._sessions[branch.session]):
            end += 1
        return end - start if end > branch.first + 1 else 0

    def states(self, branch: Branch, start: int, masks: int) -> Tensor:
        """To feed a branch's tokens from `start` on with, which are feedable, and masks after them, (tokens, hidden).

        The first token of a text is not fed, and has none.
        """
        found = self._of_tokens(branch, start, len(branch.tokens))
        if not masks:
            return found
        assert self._mask_state is not None, "this head has no masks"
        return torch.cat([found, self._mask_state.expand(masks, -1)])

    def _of_tokens(self, branch: Branch, start: int, end: int) -> Tensor:
        known = self._sessions[branch.session]
        first = max(start, branch.first + 1)
        exact_to = min(end, self._exact_to(branch, start))
        if branch.exact == start:
            branch.exact = exact_to
        if exact_to == end:
            return known.rows(first - 1, end - 1)
        indices = range(first, end)
        return torch.stack([known.rows(i - 1, i)[0] if i - 1 in known else branch.predicted[i] for i in indices])

    def remember(self, branch: Branch, predicted: Tensor) -> None:
        """The states that the head predicted at the last places of a branch that was just read, (places, hidden)."""
        after = len(branch.tokens) + 1
        branch.predicted |= zip(range(after - len(predicted), after), predicted, strict=True)
        branch.predicted = {index: state for index, state in branch.predicted.items() if index >= branch.exact}

    def _exact_to(self, branch: Branch, start: int) -> int:
        """Index of the first token from `start` on that the true state before it is missing of."""
        return self._sessions[branch.session].missing_from(max(start, branch.first + 1) - 1) + 1
