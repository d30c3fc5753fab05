"""Hidden states fed to a draft head with each token: the target's state before it, or the head's own prediction.

Token j of a text is fed with the state of position j - 1. If the target's true state is missing, the state from which
the head itself predicted the token is recycled. Cache entries made from recycled states are recomputed once the true
ones arrive (EAGLE's second pass over accepted tokens); skipping that loses about a tenth of the accepted tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.drafters.model.cached_draft import CachedDraft
from actors.drafters.model.draft_cache import Branch, DraftCache
from actors.drafters.model.session_states import SessionStates
from protos.states import StatesNeeded


class FedStates:
    """True states of all open sessions, for a head with `max_positions` positions.

    A session whose states begin mid-text begins there for the head: the tokens up to that state count as the first
    token of a text, which is not fed, and positions are counted from there.

    `project` maps rows as they are sent, (n, width), to those that the head is fed, (n, hidden). Mask tokens are fed
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
        """Registers a session; the states of one that is open already are kept."""
        self._sessions.setdefault(session, SessionStates())

    def begin(self, session: str, first: int) -> None:
        """Sets the first position that states of a session will come for; drops its known states."""
        self._sessions[session] = SessionStates(first)

    def first_of(self, session: str) -> int:
        """Returns the position at which the session's states begin."""
        return self._sessions[session].begin

    def close(self, sessions: Sequence[str]) -> None:
        """Drops sessions; unknown ones are ignored."""
        for session in sessions:
            self._sessions.pop(session, None)

    def put(self, session: str, first: int, rows: Tensor) -> None:
        """Stores true states of the positions from `first` on, (n, width). Unknown sessions are ignored."""
        known = self._sessions.get(session)
        if known is None or known.missing_from(first) >= first + len(rows):
            return
        assert rows.shape[-1] == self.needs.width, f"rows have {rows.shape[-1]} elements, not {self.needs.width}"
        known.put(first, self._project(rows))

    def rewind(self, cache: DraftCache, branch: Branch) -> None:
        """Cuts a branch before the first token fed with a recycled state, if the true state is known now.

        Predicted states are kept: tokens may be fed with them again where true states are still missing.
        """
        if 0 < branch.exact < len(branch.tokens) and branch.exact - 1 in self._sessions[branch.session]:
            cache.cut(branch, branch.exact)

    def feedable(self, draft: CachedDraft, tokens: int) -> int:
        """Returns how many of the draft's first `tokens` pending tokens can be fed now.

        0 if the pending tokens exceed the head's positions, or the text is only its first token, before which there is
        no state.
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
        """Returns the states to feed with a branch's tokens from `start` on, then with masks: (tokens, hidden).

        The tokens must be feedable. The first token of a text is not fed and has no state.
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
        """Stores the states that the head predicted at the last places of a branch just read, (places, hidden)."""
        after = len(branch.tokens) + 1
        branch.predicted |= zip(range(after - len(predicted), after), predicted, strict=True)
        branch.predicted = {index: state for index, state in branch.predicted.items() if index >= branch.exact}

    def _exact_to(self, branch: Branch, start: int) -> int:
        """Returns the index of the first token from `start` on whose preceding true state is missing."""
        return self._sessions[branch.session].missing_from(max(start, branch.first + 1) - 1) + 1
