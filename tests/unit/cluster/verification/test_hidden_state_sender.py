"""Tests hidden states for drafters: rows returned by a step, rows read from pages, and their order."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.envelope import Send, peer_of, states_stream
from cluster.verification.hidden_state_sender import HiddenStateSender
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import (
    MAX_STATES_BYTES,
    Attach,
    Close,
    Detach,
    DraftRequest,
    NoDraft,
    StateDtype,
    States,
    StatesAck,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix
from tests.scenarios.verification import DRAFTER, ROUTER, VOCABULARY, Target, text
from tests.unit.cluster.samples import KEY

WIDE = StatesFormat(width=MAX_STATES_BYTES // 8, dtype=StateDtype.BFLOAT16)  # four rows per message
SMALL = StatesFormat(width=2, dtype=StateDtype.BFLOAT16)
APART = states_stream(DRAFTER)
OTHER = "other#1"


class StatesHarness(Target):
    """Harness with an engine that has states; each row repeats its token."""

    def __init__(self, layout: StatesFormat = SMALL, asked: int | None = None, **limits: Any) -> None:
        super().__init__(asked=asked, states=layout, **limits)
        self.layout = layout

    @property
    def feeds(self) -> HiddenStateSender:
        return self.scheduler.feeds

    def attach_from(
        self,
        tokens: tuple[int, ...],
        states_from: int | None,
        session: str = "s",
        drafter: str = DRAFTER,
        by: int | None = None,
    ) -> list[Send]:
        attach = Attach(session, len(tokens), Prefix(KEY, tokens).hash, states_from, states_by=by)
        return self.scheduler.receive(drafter, attach, self.now)

    def ack(self, have_len: int, session: str = "s", drafter: str = DRAFTER) -> None:
        self.scheduler.receive(drafter, StatesAck(session, have_len), self.now)

    def compute(self, plan: StepPlan) -> list[Outcome]:
        outcomes = super().compute(plan)
        rows = {row.session: row for row in plan.rows if row.state_slots}
        return [self._with_states(outcome, rows[outcome.session]) if outcome.session in rows else outcome
                for outcome in outcomes]  # fmt: skip

    def read(self) -> list[Send]:
        """Reads states once between two steps."""
        asked = self.feeds.next_read()
        if asked is None:
            return []
        return self.feeds.sent(asked, self._rows_at(asked.slots))

    def reads(self) -> Iterator[States]:
        """Reads until capacity or states are exhausted."""
        while sends := self.read():
            for to, message in sends:
                assert to == APART
                assert isinstance(message, States)
                yield message

    def _with_states(self, outcome: Outcome, row: Row) -> Outcome:
        states = self._rows_at(row.states_along(outcome.path))
        return Outcome(outcome.session, outcome.path, outcome.next_token, outcome.margin, states)

    def _rows_at(self, slots: Sequence[int]) -> bytes:
        return b"".join(bytes([token]) * self.layout.row_bytes for token in self.memory.at(slots))


def tokens_in(states: States) -> tuple[int, ...]:
    """Returns the tokens of rows, each of which repeats one token."""
    size = states.format.row_bytes
    rows = [states.rows[at : at + size] for at in range(0, len(states.rows), size)]
    assert all(len(set(row)) == 1 for row in rows)
    return tuple(row[0] for row in rows)


def check(states: States, tokens: tuple[int, ...]) -> None:
    """Asserts that the states belong to this text and are addressed by its hash."""
    assert tokens_in(states) == tokens[states.first : states.end]
    assert states.prefix_hash == Prefix(KEY, tokens[: states.end]).hash


def to_drafter(sends: list[Send]) -> list[Any]:
    return [message for to, message in sends if to == DRAFTER]


# ---------------------------------------------------------------- with verdicts


def test_states_of_a_step_are_sent_with_its_verdict_before_the_request():
    harness = StatesHarness()
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), 0)
    verdict, states, request = to_drafter(harness.step())
    assert isinstance(verdict, Verdict)
    assert isinstance(request, DraftRequest)
    assert (states.first, states.end) == (0, 3)
    check(states, (1, 2, 3))
    _, states, _ = to_drafter(harness.step())
    assert (states.first, states.end) == (3, 4)
    check(states, (1, 2, 3, *text((1, 2, 3), 1)))
    assert harness.feeds.counts == {"verdict": 4, "apart": 0, "verdict_bytes": 16, "apart_bytes": 0}


def test_a_drafter_gets_all_existing_states_even_if_fewer_suffice():
    harness = StatesHarness()
    harness.open(tokens=(1, 2, 3), max_len=60)
    for _ in range(4):
        harness.step()
    tokens = (1, 2, 3, *text((1, 2, 3), 4))
    harness.attach_from(tokens, 0, by=5)
    (states,) = harness.reads()
    assert (states.first, states.end) == (0, len(tokens) - 1)


def test_routers_get_no_states():
    harness = StatesHarness()
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), 0)
    sends = harness.step() + harness.step()
    assert {type(message) for to, message in sends if to == ROUTER} == {Verdict}


def test_states_of_an_accepted_tree_path_are_sent_in_order():
    """Other nodes belong to another text."""
    harness = StatesHarness()
    harness.open(tokens=(1, 2))
    harness.attach_from((1, 2), 0)
    right = text((1, 2), 3)
    wrong = [(token + 1) % VOCABULARY for token in right]
    tree = DraftTree((wrong[0], right[0], wrong[1], right[1]), (-1, -1, 1, 1))
    harness.block((1, 2), tree)
    _, states, _ = to_drafter(harness.step())
    assert (states.first, states.end) == (0, 4)
    check(states, (1, 2, *right[:2]))
    _, states, _ = to_drafter(harness.step())
    check(states, (1, 2, *right[:3]))


def test_a_drafter_that_reads_no_states_gets_none():
    harness = StatesHarness()
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), None)
    assert [type(message) for message in to_drafter(harness.step())] == [Verdict, DraftRequest]
    assert not any(row.state_slots for row in harness.rows[0])
    assert harness.feeds.next_read() is None


def test_a_target_without_captured_states_announces_none():
    harness = Target()
    harness.open(tokens=(1, 2, 3))
    harness.scheduler.receive(DRAFTER, Attach("s", 3, Prefix(KEY, (1, 2, 3)).hash, 0), 0.0)
    assert [type(message) for message in to_drafter(harness.step())] == [Verdict, DraftRequest]
    assert harness.scheduler.feeds.next_read() is None


def test_a_drafter_without_requests_gets_no_states():
    """The drafter receives no verdicts either; both would be useless."""
    harness = StatesHarness(asked=0)
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), 0)
    for _ in range(3):
        assert to_drafter(harness.step()) == []
        assert harness.feeds.next_read() is None
    assert not any(row.state_slots for rows in harness.rows for row in rows)


def test_the_last_verdict_carries_no_states():
    harness = StatesHarness()
    harness.open(tokens=(1, 2, 3), max_len=4)
    harness.attach_from((1, 2, 3), 0)
    assert [type(message) for message in to_drafter(harness.step())] == [Verdict]


# ---------------------------------------------------------------- separate from verdicts


def test_states_of_a_long_prompt_are_read_in_chunks_during_prefill():
    harness = StatesHarness(WIDE, max_step_tokens=6)
    prompt = tuple(range(1, 16))
    harness.open(tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0)
    seen = []
    for chunk in (6, 6):
        assert harness.step() == [], "it is not through its prompt"
        found = list(harness.reads())
        seen += found
        harness.ack(found[-1].end)
        assert found[-1].end == sum(len(row.tokens) for rows in harness.rows for row in rows)
        assert chunk == sum(states.end - states.first for states in found)
    assert [(states.first, states.end) for states in seen] == [(0, 4), (4, 6), (6, 10), (10, 12)]
    for states in seen:
        check(states, prompt)
        assert len(states.rows) <= MAX_STATES_BYTES


def test_prompt_states_do_not_delay_verdicts():
    """While another session's prompt is fed, a decoding session's verdicts and rows go first in every step."""
    harness = StatesHarness(WIDE, max_step_tokens=8, verdict_states_bytes=2 * WIDE.row_bytes)
    harness.open("short", tokens=(1, 2))
    harness.attach_from((1, 2), 0, "short")
    harness.step()
    prompt = tuple(range(3, 40))
    harness.open("long", tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0, "long")
    for _ in range(4):
        sent = to_drafter(harness.step())
        assert [type(message) for message in sent] == [Verdict, States, DraftRequest]
        assert {message.session for message in sent} == {"short"}
        apart = list(harness.reads())
        assert {states.session for states in apart} <= {"long"}, "what rides is not read once more"
    assert harness.feeds.rows["apart"] > 0


def test_unacknowledged_states_are_bounded():
    window = 16 * WIDE.row_bytes
    harness = StatesHarness(WIDE, max_step_tokens=64, window_bytes=window)
    prompt = tuple(range(1, 40))
    harness.open(tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0)
    harness.step()
    sent = list(harness.reads())
    assert window - MAX_STATES_BYTES < sum(len(states.rows) for states in sent) <= window
    assert harness.feeds.next_read() is None
    assert to_drafter(harness.step())[0].tokens, "verdicts go on"
    harness.ack(4)
    (more,) = harness.reads()
    assert more.first == sent[-1].end


def test_invalid_acknowledgements_free_no_space():
    harness = StatesHarness(WIDE, max_step_tokens=64)
    prompt = tuple(range(1, 40))
    harness.open(tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0)
    harness.step()
    sent = list(harness.reads())
    harness.ack(30, drafter=OTHER)
    harness.ack(30, session="unknown")
    assert harness.feeds.next_read() is None
    harness.ack(2**32 - 1)
    assert next(states.first for states in harness.reads()) == sent[-1].end, "nothing that was not sent has arrived"


def test_the_shortest_range_is_sent_first():
    harness = StatesHarness(WIDE, max_step_tokens=64)
    prompts = {"long": tuple(range(1, 30)), "short": tuple(range(31, 40))}
    for name, prompt in prompts.items():
        harness.open(name, tokens=prompt)
        harness.attach_from(prompt, 0, name)
    harness.step()
    first = next(harness.reads())
    assert first.session == "short"


def test_a_late_drafter_gets_states_from_pages_without_a_forward():
    harness = StatesHarness(SMALL)
    prompt = (1, 2, 3)
    harness.open(tokens=prompt, max_len=60)
    for _ in range(4):
        harness.step()
    tokens = (*prompt, *text(prompt, 4))
    steps = len(harness.rows)
    harness.attach_from(tokens, 0)
    (states,) = harness.reads()
    assert len(harness.rows) == steps
    assert (states.first, states.end) == (0, len(tokens) - 1)
    check(states, tokens)


def test_tokens_are_fed_once_despite_drafter_changes():
    """Fed tokens exclude accepted drafts, the last token, rejected tokens and cached tokens."""
    harness = StatesHarness(SMALL)
    prompt = tuple(range(1, 14))
    right = text(prompt, 6)
    harness.open(tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0)
    harness.block(prompt, (*right[:2], (right[2] + 1) % VOCABULARY))
    harness.step()
    assert harness.scheduler.counts.known_tokens == len(prompt)
    harness.scheduler.gone(DRAFTER, harness.now)
    harness.step()
    harness.attach_from((*prompt, *right[:4]), 0, drafter=OTHER)
    assert len(list(harness.read())) == 1
    harness.step()
    assert harness.scheduler.counts.known_tokens == len(prompt) + 2
    harness.open("t", tokens=(*prompt, 20))
    harness.step()
    assert harness.scheduler.counts.known_tokens == len(prompt) + 2 + 1 + 2, "one of the first, two after whole pages"


def test_states_of_a_prefix_hit_are_read_from_shared_pages():
    harness = StatesHarness(SMALL)
    prompt = tuple(range(1, 14))
    harness.open("a", tokens=prompt)
    harness.step()
    harness.open("b", tokens=(*prompt, 20, 21))
    harness.attach_from((*prompt, 20, 21), 0, "b")
    (states,) = harness.reads()
    assert (states.session, states.first, states.end) == ("b", 0, 12), "the whole pages, before any step of its own"
    check(states, prompt)


def test_accepted_nodes_are_read_only_after_their_move():
    """Until the next step moves the nodes, their slots hold other tokens."""
    harness = StatesHarness(SMALL)
    harness.open(tokens=(1, 2))
    right = text((1, 2), 4)
    tree = DraftTree(((right[0] + 1) % VOCABULARY, right[0], right[1]), (-1, -1, 1))
    harness.block((1, 2), tree)
    harness.step()
    harness.attach_from((1, 2, *right[:3]), 0)
    (states,) = harness.reads()
    assert (states.first, states.end) == (0, 2)
    check(states, (1, 2))
    harness.ack(2)
    _, states, _ = to_drafter(harness.step())
    check(states, (1, 2, *right[:3]))
    assert states.first == 2


def test_states_with_verdicts_do_not_overtake_separate_ones():
    harness = StatesHarness(SMALL)
    harness.open(tokens=(1, 2, 3))
    harness.step()
    harness.attach_from((1, 2, 3, *text((1, 2, 3), 1)), 0)
    (apart,) = harness.reads()
    assert [type(message) for message in to_drafter(harness.step())] == [Verdict, DraftRequest]
    (late,) = harness.reads()
    assert late.first == apart.end
    harness.ack(late.end)
    assert [type(message) for message in to_drafter(harness.step())] == [Verdict, States, DraftRequest]


@pytest.mark.parametrize(("acked", "reached"), [(2, ()), (3, (1, 0, 0, 0))], ids=["on their way", "here"])
def test_a_drafter_waiting_for_states_is_not_counted_as_silent(acked, reached):
    harness = StatesHarness(SMALL)
    harness.open(tokens=(1, 2, 3))
    harness.step()
    tokens = (1, 2, 3, *text((1, 2, 3), 1))
    harness.attach_from(tokens, 0)
    list(harness.reads())
    harness.ack(acked)
    harness.scheduler.receive(DRAFTER, NoDraft("s", 4, Prefix(KEY, tokens).hash), harness.now)
    harness.step()
    assert harness.scheduler.controller.acceptance.reached == reached


@pytest.mark.parametrize("leaves", [Detach("s"), None], ids=["detached", "gone"])
def test_a_successor_gets_all_states_and_a_departed_drafter_none(leaves):
    harness = StatesHarness(SMALL)
    prompt = (1, 2, 3, 4)
    harness.open(tokens=prompt, max_len=60)
    harness.attach_from(prompt, 0)
    harness.step()
    if leaves is None:
        harness.scheduler.gone(DRAFTER, harness.now)
    else:
        harness.scheduler.receive(DRAFTER, leaves, harness.now)
    harness.step()
    assert harness.feeds.next_read() is None
    tokens = (*prompt, *text(prompt, 2))
    harness.attach_from(tokens, 0, drafter=OTHER)
    ((to, states),) = harness.read()
    assert to == f"{peer_of(OTHER)}/states"
    assert isinstance(states, States)
    check(states, tokens)
    assert states.first == 0


def test_states_read_for_a_closed_session_are_dropped():
    harness = StatesHarness(SMALL)
    harness.open(tokens=(1, 2, 3))
    harness.step()
    harness.attach_from((1, 2, 3, *text((1, 2, 3), 1)), 0)
    asked = harness.feeds.next_read()
    harness.scheduler.receive(ROUTER, Close("s", 1), harness.now)
    assert harness.feeds.sent(asked, bytes(SMALL.row_bytes * len(asked.slots))) == []


def test_a_drafter_attaching_during_a_step_gets_states_from_its_position():
    """The states sent with the verdict were meant for a drafter that lacked more states."""
    harness = StatesHarness(SMALL)
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), 0)
    plan = harness.scheduler.plan(harness.now)
    assert plan is not None
    harness.attach_from((1, 2, 3), 1)
    sent = to_drafter(harness.scheduler.apply(harness.compute(plan), 0.1, harness.now))
    assert [type(message) for message in sent] == [Verdict, DraftRequest]
    (states,) = harness.reads()
    assert (states.first, states.end) == (1, 3)


def check_preempted_sessions_go_on(harness: StatesHarness, steps: int) -> None:
    """Asserts that two sessions that exceed the cache together receive each right state once, in order."""
    prompts = {"a": tuple(range(1, 7)), "b": tuple(range(11, 17))}
    known = dict.fromkeys(prompts, 0)
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        harness.open(name, tokens=prompt, max_len=24)
        harness.attach_from(prompt, 0, name)
    for _ in range(steps):
        plan = harness.scheduler.plan(harness.now)
        if plan is None:
            break
        sends = harness.scheduler.apply(harness.compute(plan), 0.1, harness.now)
        for to, message in [*sends, *[(DRAFTER, states) for states in harness.reads()]]:
            if to == DRAFTER and isinstance(message, Verdict):
                texts[message.session] += message.tokens
            if to == DRAFTER and isinstance(message, States):
                assert message.first == known[message.session]
                check(message, tuple(texts[message.session]))
                known[message.session] = message.end
                harness.ack(message.end, message.session)
    assert harness.scheduler.admission.preempted > 0
    assert min(known.values()) > 18


def test_a_preempted_session_resumes_its_states():
    """Its pages are found or recomputed, and no states are sent again."""
    check_preempted_sessions_go_on(StatesHarness(SMALL, pages=9, max_sessions=2, max_context=24), steps=60)
