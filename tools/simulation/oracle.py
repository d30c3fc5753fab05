"""Workload of a simulation, and the oracle that replaces both models.

The target's text is a pseudo-random function of seed, session and position, and so is whether the draft agrees there.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import MAX_OUTCOMES, SIBLING_URGENCY, ForwardTime, draft_ahead, proposals
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText
from cluster.drafting.trees import Choices
from protos.messages import DraftRequest, Open, Shape


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of concurrent sessions: when one ends, the next begins.

    Sessions may come in batches, as in a benchmark: the last ones of a batch run with ever fewer others, and the next
    batch begins when all have ended.
    """

    concurrency: int
    batch: int | None = None  # sessions

    def due(self, begun: int, ended: int, sessions: int) -> int:
        """Returns how many sessions are to begin now, of `sessions` in total."""
        last = sessions if self.batch is None else min(sessions, (ended // self.batch + 1) * self.batch)
        return min(self.concurrency - (begun - ended), last - begun)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions arrive independently of each other and of the system's state.

    The arrivals of a run span exactly their mean duration: a random span would make runs hard to compare.
    """

    per_s: float

    def times(self, sessions: int, rng: random.Random) -> list[float]:
        """Draws the arrival times in seconds from the beginning, in ascending order."""
        return sorted(rng.uniform(0.0, sessions / self.per_s) for _ in range(sessions))


@dataclass(frozen=True, slots=True)
class Workload:
    """All sessions of one run."""

    arrivals: ClosedLoop | Poisson
    sessions: int
    prompt_tokens: int = 32
    new_tokens: int = 64
    stopping: float = 0.0  # share of sessions that end with a stop id before their length limit


STOP = 0
VOCABULARY = 50_000
NOISE = (0.0, 0.0)  # probabilities that the first and the second choice are right
TOKENS = tuple(range(1, VOCABULARY))  # shared by all scripts, which are many


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """One session's text, prompt included, up to its length limit, and how hard each token is to guess."""

    tokens: tuple[int, ...]
    prompt_len: int
    hardness: tuple[float, ...]  # by position: the draft agrees if its acceptance exceeds this

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def max_len(self) -> int:
        return len(self.tokens)

    @property
    def plain(self) -> tuple[int, ...]:
        """Tokens that non-speculative decoding commits: up to the first stop id, or to the length limit."""
        new = self.tokens[self.prompt_len :]
        return new[: new.index(STOP) + 1] if STOP in new else new

    def in_pages(self, size: int) -> list[list[int]]:
        """Splits all tokens into pages of `size` tokens."""
        return [list(self.tokens[at : at + size]) for at in range(0, len(self.tokens), size)]

    def agreed(self, start: int, tokens: Sequence[int]) -> int:
        """Counts how many of `tokens`, starting at position `start`, the target would decide too."""
        for index, token in enumerate(tokens):
            if token != self.tokens[start + index]:
                return index
        return len(tokens)

    def choices(self, position: int, acceptance: float, second: float) -> tuple[int, int]:
        """Returns the draft model's first and second choice; the second is right with probability `second`."""
        token = self.tokens[position]
        hardness = self.hardness[position]
        other = _other(token)
        if hardness < acceptance:
            return token, _other(other)
        return other, token if hardness < acceptance + second else _other(other)


def _other(token: int) -> int:
    """Returns a different token that is not the stop token."""
    return token % (VOCABULARY - 1) + 1


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Quality of the draft model.

    `acceptances` are those of a block's tokens, each given the ones before it; the last one holds for all further
    tokens. If the draft model is wrong, its second choice is right with probability `runner_up`. With `branches`, it
    may offer the second choice too.
    """

    acceptances: tuple[float, ...]
    runner_up: float = 0.4
    branches: bool = False

    def chances(self, index: int) -> tuple[float, float]:
        """Returns the probabilities that the first and the second choice are right at this position of a block."""
        acceptance = self.acceptances[min(index, len(self.acceptances) - 1)]
        return acceptance, (1 - acceptance) * self.runner_up


def reference_text(load: Workload, seed: int, index: int) -> ReferenceText:
    """Creates the script of one session of the load."""
    rng = random.Random(f"{seed} {index}")
    length = load.prompt_tokens + load.new_tokens
    tokens = rng.choices(TOKENS, k=length)
    if rng.random() < load.stopping:
        tokens[load.prompt_tokens + rng.randrange(load.new_tokens)] = STOP
    hardness = [rng.random() for _ in range(length)]
    return ReferenceText(tuple(tokens), load.prompt_tokens, tuple(hardness))


class OracleMethod:
    """Drafts what the scripts specify; its own probabilities are its mean acceptances."""

    outcomes = MAX_OUTCOMES

    def __init__(
        self, reference_texts: Mapping[str, ReferenceText], draft: DraftQuality, tokens_per_forward: int = 1
    ) -> None:
        self.shapes = frozenset(Shape) if draft.branches else frozenset({Shape.CHAIN})
        self.tokens_per_forward = tokens_per_forward
        self._reference_texts = reference_texts
        self.is_noise = False  # True: all of its drafts are wrong
        self._draft = draft
        self._texts: dict[str, SessionText] = {}

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        self._check(request.session, 0)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        known = len(self._texts[session].tokens)
        self._texts[session].tokens.extend(tokens)
        self._check(session, known)

    def close(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._texts.pop(session, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts without spending time; the caller accounts for it."""
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        for draft in drafts:
            self._append(draft, draft.max_tokens)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts ahead without spending time; a simulated drafter runs the search itself in virtual time."""
        return proposals(draft_ahead(self, requests, ForwardTime(), lambda: 0.0, interrupted, early))

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, request: LookaheadRequest) -> list[BlockDraft]:
        """Returns roots whose block candidates are known; candidates after the block need a forward."""
        block = request.unverified.main_path
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        self._append(root, len(block))
        root.settle()
        return [root, *[self._sibling(root, path) for path in request.unverified.off_main_path]]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing: there is no draft head."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> list[BlockDraft]:
        for draft in drafts:
            self._append(draft, min(draft.missing, self.tokens_per_forward))
            draft.settle()
        return list(drafts)

    # ------------------------------------------------------------ helpers

    def _check(self, session: str, start: int) -> None:
        decided = self._texts[session].tokens[start:]
        said = self._reference_texts[session].tokens[start : start + len(decided)]
        assert tuple(decided) == said, f"{session}: its drafter received tokens that were never decided"

    def _begin(self, request: DraftRequest | LookaheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    def _sibling(self, root: BlockDraft, path: tuple[int, ...]) -> BlockDraft:
        """Makes a root that reads a token beside the main path of the block."""
        found = self._begin(root.lookahead, max_tokens=len(path) + 1)
        found.unverified = path
        found.main = root
        found.chance = SIBLING_URGENCY
        self._append(found, len(path))
        found.settle()
        return found

    def _append(self, draft: BlockDraft, tokens: int) -> None:
        """Adds up to `tokens` tokens; a root gets its own."""
        reference_text = self._reference_texts[draft.request.session]
        base_len = draft.base_len
        for index in range(len(draft.drafted), len(draft.drafted) + tokens):
            chances = self._draft.chances(index)
            choices = reference_text.choices(base_len + index, *(NOISE if self.is_noise else chances))
            draft.append(choices[0], Choices(choices, chances))
