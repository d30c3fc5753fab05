"""The two models, replaced by an oracle: what the target would say, and where the draft would say the same.

The target's text is a keyed pseudo-random function of (seed, session, position), and so is whether the draft agrees
there. That makes 'the output equals the plain one' a comparison of integers, whatever the schedule was.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.drafting.ahead import OUTCOMES, SIBLING_FIRST, draft_ahead, proposals
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.candidates.outcomes import Choices
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_texts import SessionTexts
from cluster.drafting.timing.forward_time import ForwardTime
from protos.messages import DraftRequest, Open, Shape
from tools.simulation.workload import Workload

STOP = 0
VOCABULARY = 50_000
NOISE = (0.0, 0.0)  # chances of the first choice and of the second to be right
TOKENS = tuple(range(1, VOCABULARY))  # the same numbers for all scripts, which are many


@dataclass(frozen=True, slots=True)
class Script:
    """One session's text, prompt included, as far as its length limit, and how hard each token is to guess."""

    tokens: tuple[int, ...]
    prompt_len: int
    hardness: tuple[float, ...]  # by position: the draft agrees where its acceptance is above this

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def max_len(self) -> int:
        return len(self.tokens)

    @property
    def plain(self) -> tuple[int, ...]:
        """What plain decoding commits: up to the first stop id, or to the length limit."""
        new = self.tokens[self.prompt_len :]
        return new[: new.index(STOP) + 1] if STOP in new else new

    def in_pages(self, size: int) -> list[list[int]]:
        """All tokens, so many in each page."""
        return [list(self.tokens[at : at + size]) for at in range(0, len(self.tokens), size)]

    def agreed(self, start: int, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the first of them at position `start`, the target would say too."""
        for index, token in enumerate(tokens):
            if token != self.tokens[start + index]:
                return index
        return len(tokens)

    def choices(self, position: int, acceptance: float, second: float) -> tuple[int, int]:
        """What the draft model says there, and what it would say otherwise, which is right with chance `second`."""
        token = self.tokens[position]
        hardness = self.hardness[position]
        other = _other(token)
        if hardness < acceptance:
            return token, _other(other)
        return other, token if hardness < acceptance + second else _other(other)


def _other(token: int) -> int:
    """Another token that is no stop."""
    return token % (VOCABULARY - 1) + 1


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How good the draft model is.

    `acceptances` are those of a block's tokens, each given the ones before it; the last one holds for all further
    tokens. Where the draft model is wrong, its second choice is right with chance `runner_up`. If it `branches`, it
    may offer that one too.
    """

    acceptances: tuple[float, ...]
    runner_up: float = 0.4
    branches: bool = False

    def chances(self, index: int) -> tuple[float, float]:
        """Of the first choice and of the second to be right, at this place of a block."""
        acceptance = self.acceptances[min(index, len(self.acceptances) - 1)]
        return acceptance, (1 - acceptance) * self.runner_up


def script(load: Workload, seed: int, index: int) -> Script:
    """The script of one session of the load."""
    rng = random.Random(f"{seed} {index}")
    length = load.prompt_tokens + load.new_tokens
    tokens = rng.choices(TOKENS, k=length)
    if rng.random() < load.stopping:
        tokens[load.prompt_tokens + rng.randrange(load.new_tokens)] = STOP
    hardness = [rng.random() for _ in range(length)]
    return Script(tuple(tokens), load.prompt_tokens, tuple(hardness))


class OracleMethod:
    """Drafts what the scripts say that the draft model would; its own probabilities are its mean acceptances."""

    outcomes = OUTCOMES

    def __init__(self, scripts: Mapping[str, Script], draft: DraftQuality, tokens_per_forward: int = 1) -> None:
        self.shapes = frozenset(Shape) if draft.branches else frozenset({Shape.CHAIN})
        self.tokens_per_forward = tokens_per_forward
        self._scripts = scripts
        self.is_noise = False  # whether nothing of what it drafts is right
        self._draft = draft
        self._texts = SessionTexts()

    def open(self, request: Open) -> None:
        self._texts.open(request)
        self._check(request.session, 0)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        known = len(self._texts[session].tokens)
        self._texts.committed(session, tokens)
        self._check(session, known)

    def close(self, sessions: Sequence[str]) -> None:
        self._texts.close(sessions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """At once: what it takes is up to whoever asks."""
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        for draft in drafts:
            self._append(draft, draft.max_tokens)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """At once, too; a simulated drafter goes through the search itself, in its own time."""
        return proposals(draft_ahead(self, requests, ForwardTime(), lambda: 0.0, interrupted, early))

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, request: AheadRequest) -> list[BlockDraft]:
        """What it thought of at the places of a block is known; what it thinks of after it takes a forward."""
        block = request.unverified.trunk
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        self._append(root, len(block))
        root.settle()
        return [root, *[self._sibling(root, path) for path in request.unverified.off_trunk]]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """It has no draft head."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> list[BlockDraft]:
        for draft in drafts:
            self._append(draft, min(draft.missing, self.tokens_per_forward))
            draft.settle()
        return list(drafts)

    # ------------------------------------------------------------ helpers

    def _check(self, session: str, start: int) -> None:
        decided = self._texts[session].tokens[start:]
        said = self._scripts[session].tokens[start : start + len(decided)]
        assert tuple(decided) == said, f"{session}: its drafter was told of tokens that were never decided"

    def _begin(self, request: DraftRequest | AheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    def _sibling(self, root: BlockDraft, path: tuple[int, ...]) -> BlockDraft:
        """A root that reads a token beside the trunk of the block."""
        found = self._begin(root.ahead, max_tokens=len(path) + 1)
        found.unverified = path
        found.main = root
        found.chance = SIBLING_FIRST
        self._append(found, len(path))
        found.settle()
        return found

    def _append(self, draft: BlockDraft, tokens: int) -> None:
        """Up to so many; a root says its own."""
        script = self._scripts[draft.request.session]
        base_len = draft.base_len
        for index in range(len(draft.drafted), len(draft.drafted) + tokens):
            chances = self._draft.chances(index)
            choices = script.choices(base_len + index, *(NOISE if self.is_noise else chances))
            draft.append(choices[0], Choices(choices, chances))
