"""Workload of a simulation, and the oracle that replaces both models.

The target's text and the draft's agreement are pseudo-random functions of seed, session and position.
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
    """Keeps a fixed number of concurrent sessions: when one ends, the next begins.

    With `batch`, sessions run in batches, as in a benchmark. Concurrency falls toward the end of a batch, and the next
    batch begins when all sessions have ended.
    """

    concurrency: int
    batch: int | None = None  # number of sessions per batch

    def due(self, begun: int, ended: int, sessions: int) -> int:
        """Returns the number of sessions, of `sessions` in total, that begin now."""
        last = sessions if self.batch is None else min(sessions, (ended // self.batch + 1) * self.batch)
        return min(self.concurrency - (begun - ended), last - begun)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions arrive independently of each other and of the system's state.

    The arrivals of a run always span their mean duration, since a random span would make runs hard to compare.
    """

    per_s: float

    def times(self, sessions: int, rng: random.Random) -> list[float]:
        """Draws the arrival times in seconds from the start, in ascending order."""
        return sorted(rng.uniform(0.0, sessions / self.per_s) for _ in range(sessions))


@dataclass(frozen=True, slots=True)
class Workload:
    """All sessions of one run."""

    arrivals: ClosedLoop | Poisson
    sessions: int
    prompt_tokens: int = 32
    new_tokens: int = 64
    stopping: float = 0.0  # share of sessions that reach a stop id before the length limit


STOP = 0
VOCABULARY = 50_000
NOISE = (0.0, 0.0)  # probabilities of a correct first and second choice
TOKENS = tuple(range(1, VOCABULARY))  # shared by all reference texts


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """One session's text up to its length limit, including the prompt, with each token's difficulty for the draft."""

    tokens: tuple[int, ...]
    prompt_len: int
    hardness: tuple[float, ...]  # by position; the draft agrees if its acceptance is higher

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def max_len(self) -> int:
        return len(self.tokens)

    @property
    def plain(self) -> tuple[int, ...]:
        """Returns the tokens committed by non-speculative decoding, up to the first stop id or the length limit."""
        new = self.tokens[self.prompt_len :]
        return new[: new.index(STOP) + 1] if STOP in new else new

    def in_pages(self, size: int) -> list[list[int]]:
        """Splits all tokens into pages of `size` tokens."""
        return [list(self.tokens[at : at + size]) for at in range(0, len(self.tokens), size)]

    def agreed(self, start: int, tokens: Sequence[int]) -> int:
        """Returns the number of leading `tokens` that equal the text from position `start`."""
        for index, token in enumerate(tokens):
            if token != self.tokens[start + index]:
                return index
        return len(tokens)

    def choices(self, position: int, acceptance: float, second: float) -> tuple[int, int]:
        """Returns the draft model's first and second choice; the second is correct with probability `second`."""
        token = self.tokens[position]
        hardness = self.hardness[position]
        other = _other(token)
        if hardness < acceptance:
            return token, _other(other)
        return other, token if hardness < acceptance + second else _other(other)


def _other(token: int) -> int:
    """Returns another token, but not the stop token."""
    return token % (VOCABULARY - 1) + 1


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Quality of the draft model.

    `acceptances` holds one probability per position in a block, given acceptance of all earlier tokens; further
    positions have the last value. If the first choice is wrong, the second choice is correct with probability
    `runner_up`. With `branches`, drafts may also contain the second choice.
    """

    acceptances: tuple[float, ...]
    runner_up: float = 0.4
    branches: bool = False

    def chances(self, index: int) -> tuple[float, float]:
        """Returns the probabilities of a correct first and second choice at this position of a block."""
        acceptance = self.acceptances[min(index, len(self.acceptances) - 1)]
        return acceptance, (1 - acceptance) * self.runner_up


def reference_text(load: Workload, seed: int, index: int) -> ReferenceText:
    """Returns the reference text of session number `index` of the load."""
    rng = random.Random(f"{seed} {index}")
    length = load.prompt_tokens + load.new_tokens
    tokens = rng.choices(TOKENS, k=length)
    if rng.random() < load.stopping:
        tokens[load.prompt_tokens + rng.randrange(load.new_tokens)] = STOP
    hardness = [rng.random() for _ in range(length)]
    return ReferenceText(tuple(tokens), load.prompt_tokens, tuple(hardness))


class OracleMethod:
    """Drafts with the given quality against the reference texts; reports mean acceptances as probabilities."""

    outcomes = MAX_OUTCOMES

    def __init__(
        self, reference_texts: Mapping[str, ReferenceText], draft: DraftQuality, tokens_per_forward: int = 1
    ) -> None:
        self.shapes = frozenset(Shape) if draft.branches else frozenset({Shape.CHAIN})
        self.tokens_per_forward = tokens_per_forward
        self._reference_texts = reference_texts
        self.is_noise = False  # True: all drafted tokens are wrong
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
        """Drafts without virtual time; the caller adds the cost."""
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        for draft in drafts:
            self._append(draft, draft.max_tokens)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts ahead without virtual time; a simulated drafter runs the search itself, in virtual time."""
        return proposals(draft_ahead(self, requests, ForwardTime(), lambda: 0.0, interrupted, early))

    # ------------------------------------------------------------ interface of the lookahead search

    def roots(self, request: LookaheadRequest) -> list[BlockDraft]:
        """Returns roots with known candidates for the block; later candidates need a forward."""
        block = request.unverified.main_path
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        self._append(root, len(block))
        root.settle()
        return [root, *[self._sibling(root, path) for path in request.unverified.off_main_path]]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing, since there is no draft head."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> list[BlockDraft]:
        for draft in drafts:
            self._append(draft, min(draft.missing, self.tokens_per_forward))
            draft.settle()
        return list(drafts)

    # ------------------------------------------------------------ helpers

    def _check(self, session: str, start: int) -> None:
        decided = self._texts[session].tokens[start:]
        said = self._reference_texts[session].tokens[start : start + len(decided)]
        assert tuple(decided) == said, f"{session}: its drafter received tokens that were never committed"

    def _begin(self, request: DraftRequest | LookaheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    def _sibling(self, root: BlockDraft, path: tuple[int, ...]) -> BlockDraft:
        """Returns a root for a token off the block's main path."""
        found = self._begin(root.lookahead, max_tokens=len(path) + 1)
        found.unverified = path
        found.main = root
        found.chance = SIBLING_URGENCY
        self._append(found, len(path))
        found.settle()
        return found

    def _append(self, draft: BlockDraft, tokens: int) -> None:
        """Appends `tokens` tokens to a draft."""
        reference_text = self._reference_texts[draft.request.session]
        base_len = draft.base_len
        for index in range(len(draft.drafted), len(draft.drafted) + tokens):
            chances = self._draft.chances(index)
            choices = reference_text.choices(base_len + index, *(NOISE if self.is_noise else chances))
            draft.append(choices[0], Choices(choices, chances))
