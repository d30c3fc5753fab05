"""Tests the ledger: committing verdicts, final commits, and lost peers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import CapacityError, NonFiniteLogitsError, RequestError, TargetLostError
from cluster.routing.ledger import (
    Command,
    CommittedTokens,
    Ended,
    Failed,
    Generation,
    Phase,
    Session,
    ToDrafter,
    ToTarget,
)
from cluster.trust import issue
from protos.messages import (
    Acceptance,
    Close,
    DraftAnswer,
    Finish,
    Open,
    Refusal,
    RefusalReason,
    Sampling,
    Scoring,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import GREEDY, KEY

PROMPT = (1, 2, 3)
PLAIN = Generation(
    session="s",
    prompt=PROMPT,
    max_len=50,
    stop_ids=(0,),
    sampling=GREEDY,
    seed=7,
    draft_seed=8,
    choice=0,
    hash_key=KEY,
    acceptance=Acceptance.COUPLED,
    draft_tokens=4,
)


def a_session(target: str | None = "t1", drafter: str | None = "d1", **changes: Any) -> Session:
    session = Session(replace(PLAIN, **changes))
    if target is not None:
        session.assign_target(target)
    if drafter is not None:
        session.assign_drafter(drafter)
    return session


def a_verdict(session: Session, *tokens: int, accepted: int = 0, **changes: Any) -> Verdict:
    """Returns the current target's next verdict."""
    here = Prefix(KEY, PROMPT + session.committed)
    return replace(Verdict("s", session.attempt, len(here), here.hash, tokens, accepted, accepted), **changes)


def test_the_current_attempt_commits_and_emits_its_tokens():
    session = a_session()
    assert session.on_verdict("t1", a_verdict(session, 4, 5, accepted=1)) == [CommittedTokens((4, 5), 1, 1)]
    assert session.on_verdict("t1", a_verdict(session, 6)) == [CommittedTokens((6,), 0, 0)]
    assert session.committed == (4, 5, 6)
    counts = session.counts
    assert (counts.verifies, counts.blocks, counts.drafted, counts.accepted, counts.void) == (2, 1, 1, 1, 0)


def test_rejected_tokens_are_requested_of_the_target_and_emitted_with_commits():
    session = Session(replace(PLAIN, wants_rejected=True))
    opens = [*session.assign_target("t1"), *session.assign_drafter("d1")]
    assert [(type(sent), sent.message.wants_rejected) for sent in opens] == [(ToTarget, True), (ToDrafter, False)]
    verdict = a_verdict(session, 4, 5, accepted=1, drafted=3, rejected=(6, 7))
    assert session.on_verdict("t1", verdict) == [CommittedTokens((4, 5), 1, 3, rejected=(6, 7))]


def test_cached_prompt_tokens_are_reported_with_the_first_commit():
    session = a_session()
    assert session.on_verdict("t1", a_verdict(session, 4, prefix_cached=2)) == [CommittedTokens((4,), 0, 0, cached=2)]
    assert session.on_verdict("t1", a_verdict(session, 5, prefix_cached=2)) == [CommittedTokens((5,), 0, 0)]
    again = a_session()
    assert again.on_verdict("t1", a_verdict(again, 4, prefix_cached=9)) == [
        CommittedTokens((4,), 0, 0, cached=len(PROMPT))
    ]


VOID = {
    "another attempt's": {"attempt": 2},
    "an older attempt's": {"attempt": 0},
    "a gap": {"base_len": 4},
    "an overlap": {"base_len": 2},
    "another history": {"prefix_hash": 1},
    "nothing decided": {"tokens": ()},
}


@pytest.mark.parametrize("changes", VOID.values(), ids=VOID)
def test_a_verdict_for_another_attempt_or_length_is_void(changes):
    session = a_session()
    assert session.on_verdict("t1", a_verdict(session, 4, **changes)) == []
    assert session.committed == ()
    assert session.counts.void == 1


def test_a_verdict_from_another_source_is_void():
    session = a_session()
    assert session.on_verdict("t2", a_verdict(session, 4)) == []
    assert session.on_verdict("d1", a_verdict(session, 4)) == []
    assert session.committed == ()


def test_the_same_verdict_twice_commits_once():
    session = a_session()
    verdict = a_verdict(session, 4)
    session.on_verdict("t1", verdict)
    assert session.on_verdict("t1", verdict) == []
    assert session.committed == (4,)


def test_a_replaced_target_that_resumes_commits_nothing():
    """Its late verdicts are ignored, even under its successor's address and even if they are right."""
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4))
    stale_verdict = a_verdict(session, 5)
    assert session.on_target_gone("t1") == []
    assert session.on_verdict("t1", stale_verdict) == [], "while no target is assigned"
    opened = session.assign_target("t2")
    assert session.on_verdict("t1", stale_verdict) == []
    assert session.on_verdict("t2", stale_verdict) == []
    assert session.on_target_gone("t1") == [], "its stream may also break twice"
    assert session.committed == (4,)
    first = opened[0]
    assert isinstance(first, ToTarget)
    assert isinstance(first.message, Open)
    assert (first.address, first.message.attempt, first.message.tokens) == ("t2", 2, (*PROMPT, 4))
    assert first.message.prompt_len == len(PROMPT), "penalties count generated tokens from here"


def test_a_contradictory_verdict_moves_the_session_to_another_target():
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4))
    assert session.on_target_unreadable("t2", 1) == [], "it is another target's session"
    assert session.on_target_unreadable("t1", 0) == [], "it was of an older attempt"
    assert session.on_target_unreadable("t1", 1) == [ToTarget("t1", Close("s", 1))]
    assert session.phase is Phase.SEEKING
    assert session.failed_targets == {"t1"}
    assert session.committed == (4,)
    assert session.on_target_unreadable("t1", 1) == [], "it said so twice"


def test_a_sessions_drafter_follows_it_to_the_next_target():
    session = a_session()
    session.on_target_gone("t1")
    to_drafter = session.assign_target("t2")[1]
    assert isinstance(to_drafter, ToDrafter)
    assert isinstance(to_drafter.message, Open)
    assert (to_drafter.address, to_drafter.message.target_address) == ("d1", "t2")


def test_a_prompts_scores_are_requested_until_the_first_tokens():
    session = a_session(None, None, scoring=Scoring(2, 3))
    requested = []
    for target in ("t1", "t2"):
        (to_target,) = session.assign_target(target)
        assert isinstance(to_target, ToTarget)
        assert isinstance(to_target.message, Open)
        requested.append(to_target.message.scoring)
        session.on_verdict(target, a_verdict(session, 4))
        session.leave_target()
    assert requested == [Scoring(2, 3), Scoring(2, None)]


def test_a_request_that_loses_several_targets_in_a_row_fails():
    """The request may have crashed the targets."""
    session = a_session(target=None, drafter=None)
    for number in range(10):
        assert session.phase is Phase.SEEKING
        session.assign_target(f"t{number}")
        if number == 1:
            session.assign_drafter("d1")
        commands = session.on_target_gone(f"t{number}")
        if session.phase is Phase.DONE:
            break
    close, failed = commands
    assert 1 < session.attempt < 10
    assert close == ToDrafter("d1", Close("s", session.attempt))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TargetLostError)
    assert session.failed_targets == {f"t{number}" for number in range(session.attempt)}


@pytest.mark.parametrize(("tokens", "survives"), [(100, True), (1, False)])
def test_a_request_that_commits_enough_tokens_in_between_survives_any_number_of_lost_targets(tokens, survives):
    """A request that loses its target again after a few tokens may be the cause of the crash."""
    session = a_session(drafter=None, max_len=10_000)
    for number in range(2, 22):
        session.on_verdict(session.target, a_verdict(session, *range(100, 100 + tokens)))
        session.on_target_gone(session.target)
        if session.phase is Phase.DONE:
            break
        session.assign_target(f"t{number}")
    assert (session.phase is Phase.RUNNING) == survives
    assert (session.attempt > 10) == survives


def test_losing_a_drafter_costs_no_attempt_and_no_token():
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4))
    assert session.on_drafter_gone("d2") == []
    assert not session.wants_drafter, "another drafter's loss is nothing to this session"
    assert session.on_drafter_gone("d1") == []
    assert session.wants_drafter
    session.on_verdict("t1", a_verdict(session, 5))
    (command,) = session.assign_drafter("d2")
    assert isinstance(command, ToDrafter)
    assert isinstance(command.message, Open)
    assert (command.address, command.message.attempt, command.message.tokens) == ("d2", 1, (*PROMPT, 4, 5))


def test_a_useless_drafter_is_released_and_closed():
    session = a_session()
    assert session.leave_drafter() == [ToDrafter("d1", Close("s", 1))]
    assert session.wants_drafter
    ((command),) = session.assign_drafter("d2")
    assert isinstance(command, ToDrafter)
    assert command.address == "d2"


def test_each_drafters_first_block_is_recorded_separately():
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4, answer=DraftAnswer.MISSED))
    assert not session.has_drafted
    session.on_verdict("t1", a_verdict(session, 5, answer=DraftAnswer.GIVEN))
    assert session.has_drafted
    session.leave_drafter()
    session.assign_drafter("d2")
    assert not session.has_drafted


def test_a_resync_is_answered_with_the_ledger_to_the_current_drafter_only():
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4))
    (command,) = session.on_drafter_resync("d1")
    assert isinstance(command, ToDrafter)
    assert isinstance(command.message, Open)
    assert command.message.tokens == (*PROMPT, 4)
    assert session.on_drafter_resync("d2") == []
    session.on_target_gone("t1")
    assert session.on_drafter_resync("d1") == [], "there is nobody to draft for"


@pytest.mark.parametrize(("acceptance", "seed"), [(Acceptance.COUPLED, 7), (Acceptance.REJECTION, 8)])
def test_a_drafter_gets_the_acceptance_seed_only_where_it_must_draw_the_same(acceptance, seed):
    """Under rejection sampling, a drafter with the seed could predict acceptance and bias the text."""
    session = a_session(target=None, drafter=None, acceptance=acceptance)
    (to_target,) = session.assign_target("t1")
    (to_drafter,) = session.assign_drafter("d1")
    assert isinstance(to_target, ToTarget)
    assert isinstance(to_drafter, ToDrafter)
    assert isinstance(to_target.message, Open)
    assert isinstance(to_drafter.message, Open)
    assert to_target.message.seed == 7
    assert to_drafter.message.seed == seed


def test_non_speculative_decoding_requests_no_drafter():
    assert not a_session(drafter=None, draft_tokens=0).wants_drafter


def test_an_end_frees_both_sides_once():
    session = a_session()
    emit, to_target, to_drafter, ended = session.on_verdict("t1", a_verdict(session, 4, 0, finish=Finish.STOP))
    assert emit == CommittedTokens((4, 0), 0, 0)
    assert (to_target, to_drafter) == (ToTarget("t1", Close("s", 1)), ToDrafter("d1", Close("s", 1)))
    assert ended == Ended(Finish.STOP)
    assert session.cancel() == []


def test_cancelling_is_idempotent():
    session = a_session()
    assert session.cancel() == [ToTarget("t1", Close("s", 1)), ToDrafter("d1", Close("s", 1))]
    assert session.cancel() == []
    assert session.on_target_gone("t1") == []
    assert session.fail(CapacityError("late")) == []


def test_a_request_refused_by_the_target_fails_at_once_with_the_reason():
    session = a_session()
    *closes, failed = session.on_target_refusal("t1", Refusal("s", 1, RefusalReason.INVALID, "token 99 is unknown"))
    assert closes == [ToDrafter("d1", Close("s", 1))]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, RequestError)
    assert "token 99" in str(failed.error)


def test_nonfinite_logits_fail_a_request_without_retry():
    session = a_session()
    session.on_verdict("t1", a_verdict(session, 4))
    refusal = Refusal("s", 1, RefusalReason.NONFINITE_LOGITS, "NaN")
    assert session.on_target_refusal("t1", replace(refusal, attempt=0)) == [], "of an older attempt"
    *closes, failed = session.on_target_refusal("t1", refusal)
    assert closes == [ToDrafter("d1", Close("s", 1))]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NonFiniteLogitsError)
    assert (session.phase, session.attempt, session.committed) == (Phase.DONE, 1, (4,))
    assert (session.failures, session.failed_targets) == (0, frozenset())
    assert session.on_target_refusal("t1", refusal) == []


def test_a_session_leaves_a_full_target():
    session = a_session()
    full = Refusal("s", 1, RefusalReason.OVERLOADED, "full")
    assert session.on_target_refusal("t2", full) == []
    assert session.on_target_refusal("t1", replace(full, attempt=0)) == []
    assert session.phase is Phase.RUNNING
    assert session.on_target_refusal("t1", full) == []
    assert session.phase is Phase.SEEKING
    assert not session.failed_targets, "to be full is no failure"


def test_a_refusing_drafter_gets_a_close_in_case_an_open_crossed_it():
    session = a_session()
    full = Refusal("s", 1, RefusalReason.OVERLOADED, "full")
    assert session.on_drafter_refusal("d2", full) == []
    assert session.on_drafter_refusal("d1", full) == [ToDrafter("d1", Close("s", 1))]
    assert session.wants_drafter, "another may take it"


# ---------------------------------------------------------------- any order of events

ADDRESSES = st.sampled_from(["t1", "t2", "t3", "d1", "d2"])


class AnyOrder(RuleBasedStateMachine):
    """State machine for the ledger under all messages of its peers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(replace(PLAIN, sampling=Sampling()))
        self.committed: tuple[int, ...] = ()
        self.over = False
        self.attempts = 0

    def checked(self, before: tuple[str | None, str | None], commands: list[Command], commits: bool = False) -> None:
        """Asserts the invariants of every answer, given the target and drafter before the event."""
        assert not (self.over and commands), "something was asked for after the end"
        targets = {before[0], self.session.target}
        drafters = {before[1], self.session.drafter}
        for command in commands:
            assert not isinstance(command, CommittedTokens) or commits
            if isinstance(command, ToTarget):
                assert command.address in targets - {None}
            if isinstance(command, ToDrafter):
                assert command.address in drafters - {None}
            if isinstance(command, ToTarget | ToDrafter) and isinstance(command.message, Open):
                assert command.message.tokens == PROMPT + self.session.committed
                assert command.message.attempt == self.session.attempt
        ends = [command for command in commands if isinstance(command, Ended | Failed)]
        assert len(ends) <= 1
        if self.session.phase is Phase.DONE and not self.over:
            closed = {c.address for c in commands if isinstance(c, ToTarget | ToDrafter)}
            left = {before[1]} if before[0] in self.session.failed_targets else set(before)
            assert left - {None} - closed <= self.lost_by_refusal(before, ends), "a peer was not told of the end"
            self.over = True

    def lost_by_refusal(self, before: tuple[str | None, str | None], ends: list[Any]) -> set[str | None]:
        """Returns the target that refused the session or ended it for its logits; it holds no state of the session."""
        by_target = RequestError | NonFiniteLogitsError
        refused = any(isinstance(end, Failed) and isinstance(end.error, by_target) for end in ends)
        return {before[0]} if refused else set()

    @property
    def peers(self) -> tuple[str | None, str | None]:
        return self.session.target, self.session.drafter

    @precondition(lambda self: self.session.phase is Phase.SEEKING)
    @rule(address=st.sampled_from(["t1", "t2", "t3"]))
    def assign_target(self, address: str) -> None:
        before = self.peers
        self.checked(before, self.session.assign_target(address))
        assert self.session.attempt == self.attempts + 1
        assert self.session.failures < 10
        self.attempts += 1

    @precondition(lambda self: self.session.wants_drafter)
    @rule(address=st.sampled_from(["d1", "d2"]))
    def assign_drafter(self, address: str) -> None:
        before = self.peers
        self.checked(before, self.session.assign_drafter(address))

    @rule(
        source=st.none() | ADDRESSES,
        attempt_off=st.sampled_from([0, 0, 0, -1, 1]),
        len_off=st.sampled_from([0, 0, 0, -1, 1]),
        right_hash=st.sampled_from([True, True, True, False]),
        tokens=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        finish=st.sampled_from([Finish.NONE] * 6 + [Finish.STOP, Finish.LENGTH]),
    )
    def verdict(self, source, attempt_off, len_off, right_hash, tokens, finish) -> None:
        before = self.peers
        session = self.session
        source = source or session.target or "t1"
        verdict = a_verdict(session, *tokens, finish=finish)
        verdict = replace(
            verdict,
            attempt=verdict.attempt + attempt_off,
            base_len=verdict.base_len + len_off,
            prefix_hash=verdict.prefix_hash ^ (not right_hash),
        )
        valid = (source, attempt_off, len_off, right_hash) == (session.target, 0, 0, True)
        valid = valid and session.phase is Phase.RUNNING
        commands = session.on_verdict(source, verdict)
        self.checked(before, commands, commits=valid)
        assert bool(commands) == valid
        if valid:
            assert session.committed == self.committed + tokens
            self.committed = session.committed

    @rule(source=ADDRESSES)
    def target_gone(self, source: str) -> None:
        before = self.peers
        self.checked(before, self.session.on_target_gone(source))

    @rule(source=ADDRESSES, attempt_off=st.sampled_from([0, 1]), reason=st.sampled_from(RefusalReason))
    def refused(self, source: str, attempt_off: int, reason: RefusalReason) -> None:
        before = self.peers
        refusal = Refusal("s", self.session.attempt - attempt_off, reason, "no")
        self.checked(before, self.session.on_target_refusal(source, refusal))

    @rule(source=ADDRESSES)
    def drafter_gone(self, source: str) -> None:
        before = self.peers
        self.checked(before, self.session.on_drafter_gone(source))

    @rule(source=ADDRESSES)
    def drafter_resync(self, source: str) -> None:
        before = self.peers
        self.checked(before, self.session.on_drafter_resync(source))

    @precondition(lambda self: self.attempts > 1)
    @rule(give_up=st.booleans())
    def leave(self, give_up: bool) -> None:
        before = self.peers
        self.checked(before, self.session.fail(CapacityError("full")) if give_up else self.session.cancel())

    @invariant()
    def committed_stays(self) -> None:
        assert self.session.committed == self.committed
        assert self.over == (self.session.phase is Phase.DONE)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25)


# ---------------------------------------------------------------- assignment tokens


def test_each_drafter_gets_its_own_assignment_token_and_only_the_target_the_key():
    session = Session(PLAIN, b"secret")
    (to_target,) = session.assign_target("t1")
    assert isinstance(to_target, ToTarget)
    assert isinstance(to_target.message, Open)
    assert (to_target.message.token_key, to_target.message.assignment_token) == (b"secret", None)
    shown = []
    for drafter in ("d1", "d2"):
        (to_drafter,) = session.assign_drafter(drafter)
        (again,) = session.on_drafter_resync(drafter)
        assert again == to_drafter, "the ledger again is the same assignment"
        assert isinstance(to_drafter, ToDrafter)
        assert isinstance(to_drafter.message, Open)
        assert to_drafter.message.token_key == b""
        shown.append(to_drafter.message.assignment_token)
        session.leave_drafter()
    assert shown == [issue(b"secret", PLAIN.session, number) for number in (1, 2)]


def test_every_drafter_gets_the_drafts_prompt_and_no_target_does():
    """A session that moves to another drafter or target opens there with the same prompt."""
    session = a_session(None, None, draft_prompt=(9, 8))
    commands = [*session.assign_target("t1"), *session.assign_drafter("d1"), *session.on_drafter_resync("d1")]
    commands += [*session.on_drafter_gone("d1"), *session.assign_drafter("d2")]
    commands += [*session.on_target_gone("t1"), *session.assign_target("t2")]
    opens = [command for command in commands if isinstance(command.message, Open)]
    assert [one.address for one in opens] == ["t1", "d1", "d1", "d2", "t2", "d2"]
    prompts = {one.address: one.message.draft_prompt for one in opens}
    assert prompts == {"t1": (), "t2": (), "d1": (9, 8), "d2": (9, 8)}
