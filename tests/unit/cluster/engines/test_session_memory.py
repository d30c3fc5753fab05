"""An engine that manages its own pages is limited by the tokens fed, not by the plan."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from cluster.page_allocator import EnginePages
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome, Row, StateRead
from protos.draft_tree import DraftTree
from protos.messages import (
    Acceptance,
    Attach,
    Block,
    Open,
    RefusalReason,
    Sampling,
    Scoring,
    StateDtype,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix

LIMITS = VerificationLimits(
    vocabulary=100, max_context=64, max_sessions=4, max_step_tokens=64, pages=8, page_size=8, own_draws_only=True
)
PROMPT = (1, 2, 3, 4, 5)


def asked(session: str = "a", **changes: object) -> Open:
    fields: dict[str, object] = {
        "session": session,
        "attempt": 1,
        "tokens": PROMPT,
        "prompt_len": len(PROMPT),
        "max_len": 20,
        "stop_ids": (),
        "sampling": Sampling(temperature=0.0),
        "seed": 0,
        "choice": 0,
        "hash_key": 3,
        "acceptance": Acceptance.COUPLED,
        "draft_tokens": 4,
    }
    return Open(**{**fields, **changes})  # type: ignore[arg-type]


class Scene:
    """Target whose engine reports the fed tokens."""

    def __init__(self, states: StatesFormat | None = None) -> None:
        self.memory = EnginePages(LIMITS.pages, LIMITS.page_size)
        self.scheduler = VerificationScheduler(replace(LIMITS, states=states), LockStep(), memory=self.memory)
        self.prefix = Prefix(3, PROMPT)
        self.now = 0.0

    def step(
        self,
        fed: Mapping[str, Row],
        *outcomes: Outcome,
        held: int = 1,
        computed: Mapping[str, int] = MappingProxyType({}),
    ) -> list[Verdict]:
        self.memory.record_step(fed, held, computed)
        self.now += 1.0
        sends = self.scheduler.apply(outcomes, 0.01, self.now)
        verdicts = [message for _, message in sends if isinstance(message, Verdict)]
        for verdict in verdicts:
            self.prefix.extend(verdict.tokens)
        return verdicts

    def planned(self) -> dict[str, Row]:
        plan = self.scheduler.plan(self.now)
        return {row.session: row for row in plan.rows}


def test_a_prompt_is_fed_in_the_engines_pieces() -> None:
    scene = Scene()
    scene.scheduler.receive("router#1", asked(), 0.0)
    (row,) = scene.planned().values()
    assert (row.tokens, row.decide) == (PROMPT, True)
    assert scene.step({"a": Row("a", PROMPT[:2], 0, decide=False, pages=())}) == []
    (row,) = scene.planned().values()
    assert (row.start, row.tokens) == (2, PROMPT[2:])
    (verdict,) = scene.step({"a": row}, Outcome("a", (), 9))
    assert verdict.tokens == (9,)


def test_a_row_without_memory_is_retried_and_keeps_its_block() -> None:
    scene = Scene()
    scene.scheduler.receive("router#1", asked(), 0.0)
    scene.step(scene.planned(), Outcome("a", (), 9))
    block = Block("a", scene.prefix.length, scene.prefix.hash, DraftTree.chain((10, 11)))
    scene.scheduler.receive("drafter#1", block, 0.0)
    assert scene.planned()["a"].drafted == 2
    assert scene.step({}) == []
    again = scene.planned()
    assert again["a"].drafted == 2
    (verdict,) = scene.step(again, Outcome("a", (0,), 12))
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == ((10, 12), 1, 2)


def test_a_truncated_draft_counts_up_to_its_fed_length() -> None:
    scene = Scene()
    scene.scheduler.receive("router#1", asked(), 0.0)
    scene.step(scene.planned(), Outcome("a", (), 9))
    block = Block("a", scene.prefix.length, scene.prefix.hash, DraftTree.chain((10, 11)))
    scene.scheduler.receive("drafter#1", block, 0.0)
    row = scene.planned()["a"]
    cut = Row("a", row.tokens[:2], row.start, decide=True, pages=(), draft=row.draft.first(1))
    (verdict,) = scene.step({"a": cut}, Outcome("a", (0,), 12))
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == ((10, 12), 1, 1)


def test_tokens_lost_by_preemption_are_recomputed() -> None:
    scene = Scene()
    scene.scheduler.receive("router#1", asked(), 0.0)
    scene.step(scene.planned(), Outcome("a", (), 9))
    scene.planned()
    scene.step({"a": Row("a", PROMPT[:4], 0, decide=False, pages=())})
    row = scene.planned()["a"]
    assert (row.start, row.tokens) == (4, (5, 9))


def test_no_pages_are_planned_for_an_engine_with_its_own() -> None:
    scene = Scene()
    for name in "abcd":
        scene.scheduler.receive("router#1", asked(name), 0.0)
    rows = scene.planned()
    assert len(rows) == 4
    scene.step(rows, *[Outcome(name, (), 9) for name in rows], held=6)
    assert scene.scheduler.page_counts == {"total": 8, "held": 6}


def test_cached_tokens_are_reported_after_the_first_step() -> None:
    """vLLM finds shared pages when scheduling; tokens recomputed after a preemption were not shared."""
    scene = Scene()
    scene.scheduler.receive("router#1", asked(), 0.0)
    scene.planned()
    (verdict,) = scene.step({"a": Row("a", PROMPT[4:], 4, decide=True, pages=())}, Outcome("a", (), 9))
    assert verdict.prefix_cached == 4
    scene.planned()
    scene.step({"a": Row("a", PROMPT[2:], 2, decide=False, pages=())})
    (verdict,) = scene.step(scene.planned(), Outcome("a", (), 9))
    assert verdict.prefix_cached == 4


def test_states_are_requested_by_position_up_to_the_engines_length() -> None:
    """vLLM may preempt a session within a step, and the scheduler learns of it only afterwards."""
    scene = Scene(StatesFormat(2, StateDtype.BFLOAT16))
    scene.scheduler.receive("router#1", asked(), 0.0)
    scene.scheduler.receive("drafter#1", Attach("a", len(PROMPT), scene.prefix.hash, states_from=0), 0.0)
    assert scene.planned()["a"].state_slots == (0, 1, 2, 3, 4)
    scene.step({"a": Row("a", PROMPT[:3], 0, decide=False, pages=())}, computed={"a": 3})
    feeds = scene.scheduler.feeds
    assert feeds.next_read() == StateRead("a", 0, (0, 1, 2))
    scene.planned()
    scene.step({}, computed={"a": 0})
    assert feeds.next_read() is None
    scene.planned()
    scene.step({"a": Row("a", PROMPT[:2], 0, decide=False, pages=())}, computed={"a": 2})
    assert feeds.next_read() == StateRead("a", 0, (0, 1))


def test_rejection_sampling_and_prompt_scores_are_refused_with_a_reason() -> None:
    scene = Scene()
    for request, word in (
        (asked(acceptance=Acceptance.REJECTION, sampling=Sampling()), "acceptance is rejection"),
        (asked(scoring=Scoring(prompt_top=0)), "prompt_logprobs"),
    ):
        ((_, refusal),) = scene.scheduler.receive("router#1", request, 0.0)
        assert refusal.reason is RefusalReason.INVALID
        assert word in refusal.message
    assert scene.scheduler.receive("router#1", asked(acceptance=Acceptance.REJECTION), 0.0) == [], (
        "greedy sessions need no draft probabilities"
    )
