"""The target's step: rows in, decisions out; sampling and acceptance sit beside the logits.

Knows which session has which slot; does not know why a row is in a step.
"""

from dataclasses import dataclass

from torch import Tensor

from actors.acceptance import DrawAddress, accept
from actors.cache import FeedRow
from actors.runner import Runner
from actors.sampling import process
from cluster.steps import Outcome, Row, StepPlan
from protos.messages import Open


@dataclass(frozen=True, slots=True)
class _Session:
    open: Open
    slot: int
    tokens: list[int]  # all that was fed; a rollback shortens it


class StepExecutor:
    """Runs step plans on a `Runner`; ids from `vocabulary` on are the model's padding and never drawn."""

    def __init__(self, runner: Runner, vocabulary: int) -> None:
        self._runner, self._vocabulary = runner, vocabulary
        self._slots = len(runner.free_slots)
        self._sessions: dict[str, _Session] = {}

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Forgets, adds, feeds, decides; one outcome per deciding row, in order."""
        for name in plan.closes:
            self._runner.free_slots.append(self._sessions.pop(name).slot)
        for request in plan.opens:
            assert request.session not in self._sessions, f"session {request.session} is open already"
            self._sessions[request.session] = _Session(request, self._runner.free_slots.pop(), [])
        if not plan.rows:
            self._check_integrity()
            return []
        logits = self._runner.forward([self._feed(row) for row in plan.rows])
        return self._decide(plan, logits)

    @property
    def is_idle(self) -> bool:
        return not self._sessions

    def _check_integrity(self) -> None:
        """In tests and in production alike, whenever a step has nothing to compute: no slot was lost or shared."""
        held = [session.slot for session in self._sessions.values()]
        assert sorted([*held, *self._runner.free_slots]) == list(range(self._slots)), "slots were lost or shared"

    def _feed(self, row: Row) -> FeedRow:
        session = self._sessions[row.session]
        assert row.start <= len(session.tokens), "a row starts beyond what is cached"
        session.tokens[row.start :] = row.tokens
        return FeedRow(session.slot, row.tokens, row.start, row.draft_len + 1 if row.decide else 0)

    def _decide(self, plan: StepPlan, logits: Tensor) -> list[Outcome]:
        outcomes: list[Outcome] = []
        begin = 0
        for row in plan.rows:
            if not row.decide:
                continue
            end = begin + row.draft_len + 1
            outcomes.append(self._decide_row(row, logits[begin:end, : self._vocabulary]))
            begin = end
        return outcomes

    def _decide_row(self, row: Row, logits: Tensor) -> Outcome:
        session = self._sessions[row.session]
        request = session.open
        base_len = row.start + len(row.tokens) - row.draft_len
        draft = row.tokens[len(row.tokens) - row.draft_len :]
        generated = session.tokens[request.prompt_len : base_len] if request.sampling.penalised else ()
        decision = accept(
            request.acceptance,
            request.sampling.greedy,
            process(logits, request.sampling, generated, draft),
            draft,
            row.draft_probs,
            DrawAddress(request.seed, request.choice, base_len),
        )
        return Outcome(row.session, decision.accepted, decision.next_token)
