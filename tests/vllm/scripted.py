"""Target sessions without peers: a real scheduler and engine, with scripted blocks."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.page_allocator import SessionMemory
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import (
    Acceptance,
    Block,
    Close,
    Open,
    Refusal,
    RefusalReason,
    Sampling,
    TokenScore,
    Verdict,
)
from protos.prefix import Prefix

LONGEST = 6  # maximum tokens per block
VOCABULARY = 259
CONTEXT = 256
STEP_TOKENS = 64  # maximum tokens per step
Script = Callable[[str, Prefix], Iterable[Block]]
"""Messages that drafters send for a session once it reaches a prefix."""


@dataclass
class Life:
    """Router's view of a session."""

    open: Open
    prefix: Prefix
    is_over: bool = False
    refused: RefusalReason | None = None
    verdicts: int = 0
    accepted: int = 0
    scores: list[TokenScore] = field(default_factory=list)
    margin: float | None = None

    @property
    def text(self) -> list[int]:
        return self.prefix.tokens[self.open.prompt_len :]


@dataclass
class ScriptedTarget:
    """Target that runs sessions to their end."""

    step: Callable[[StepPlan], list[Outcome]]
    limits: VerificationLimits
    memory: SessionMemory | None = None
    now: float = 0.0
    steps: int = 0
    lives: dict[str, Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = VerificationScheduler(self.limits, LockStep(), memory=self.memory)

    def open(self, request: Open) -> None:
        self.lives[request.session] = Life(request, Prefix(request.hash_key, request.tokens))
        assert self.scheduler.receive("router#1", request, self.now) == []

    def close(self, session: str) -> None:
        life = self.lives[session]
        life.is_over = True
        self.scheduler.receive("router#1", Close(session, life.open.attempt), self.now)

    def run(self, script: Script, each_step: Callable[[int], None] = lambda step: None) -> None:
        """Runs until every session has ended and the engine has released it."""
        while not all(life.is_over for life in self.lives.values()):
            for session, life in self.lives.items():
                for block in () if life.is_over else script(session, life.prefix):
                    self.scheduler.receive("drafter#1", block, self.now)
            self.turn()
            self.steps += 1
            assert self.steps < 4000, "sessions do not come to an end"
            each_step(self.steps)
        self.turn()

    def turn(self) -> None:
        plan = self.scheduler.plan(self.now)
        self.now += 1.0
        if plan is None:
            return
        for _, message in self.scheduler.apply(self.step(plan), 0.01, self.now):
            if isinstance(message, Refusal):
                life = self.lives[message.session]
                life.is_over, life.refused = True, message.reason
            else:
                assert isinstance(message, Verdict)
                self._take(message)

    def _take(self, verdict: Verdict) -> None:
        life = self.lives[verdict.session]
        if life.is_over:
            return
        assert life.prefix.matches(verdict.base_len, verdict.prefix_hash)
        life.prefix.extend(verdict.tokens)
        life.verdicts += 1
        life.accepted += verdict.accepted
        life.scores += verdict.scores
        life.margin = verdict.margin
        life.is_over = bool(verdict.finish)


def request(session: str, sampling: Sampling, prompt: list[int], new_tokens: int = 40, **more: Any) -> Open:
    return Open(
        session=session,
        attempt=1,
        tokens=tuple(prompt),
        prompt_len=len(prompt),
        max_len=len(prompt) + new_tokens,
        sampling=sampling,
        seed=len(session) + prompt[0],
        choice=0,
        hash_key=99,
        acceptance=Acceptance.COUPLED,
        draft_tokens=LONGEST,
        **{"stop_ids": (), **more},
    )


def block(session: str, prefix: Prefix, tokens: Iterable[int]) -> list[Block]:
    chain = tuple(tokens)[:LONGEST]
    return [Block(session, prefix.length, prefix.hash, DraftTree.chain(chain))] if chain else []


class Scripts:
    """Scripted blocks from the whole text of each session, including the prompt."""

    def __init__(self, whole: dict[str, list[int]], seed: int = 0) -> None:
        self._whole = whole
        self._random = random.Random(seed)

    def none(self, session: str, prefix: Prefix) -> list[Block]:
        return []

    def right(self, session: str, prefix: Prefix) -> list[Block]:
        return self._right(session, prefix, LONGEST)

    def wrong(self, session: str, prefix: Prefix) -> list[Block]:
        tokens = self._ahead(session, prefix, LONGEST)
        return block(session, prefix, [(token + 1) % VOCABULARY for token in tokens])

    def random(self, session: str, prefix: Prefix) -> list[Block]:
        length = min(self._random.randrange(LONGEST + 1), len(self._ahead(session, prefix, LONGEST)))
        return block(session, prefix, [self._random.randrange(VOCABULARY) for _ in range(length)])

    def variable(self, session: str, prefix: Prefix) -> list[Block]:
        return self._right(session, prefix, self._random.randrange(LONGEST + 1))

    def mixed(self, session: str, prefix: Prefix) -> list[Block]:
        """Returns mostly right blocks; some are doubled, late, for another text, or missing."""
        late = Prefix(99, prefix.tokens[: -self._random.randrange(1, 3)])
        elsewhere = Prefix(99, [*prefix.tokens[:-1], (prefix.tokens[-1] + 1) % VOCABULARY])
        tokens = [
            token if self._random.random() < 0.7 else (token + 1) % VOCABULARY
            for token in self._ahead(session, prefix, self._random.randrange(LONGEST + 1))
        ]
        blocks = [
            *block(session, late, self._ahead(session, late, LONGEST)),
            *block(session, elsewhere, tokens),
            *block(session, prefix, tokens),
        ]
        blocks += blocks[-1:] if self._random.random() < 0.3 else []
        self._random.shuffle(blocks)
        return blocks if self._random.random() < 0.8 else []

    def _right(self, session: str, prefix: Prefix, length: int) -> list[Block]:
        return block(session, prefix, self._ahead(session, prefix, length))

    def _ahead(self, session: str, prefix: Prefix, length: int) -> list[int]:
        """Returns the following tokens, except the last token, which needs no block."""
        return self._whole[session][prefix.length : prefix.length + length][
            : len(self._whole[session]) - prefix.length - 1
        ]
