"""Without state pages, a step's hidden states are sent before the next step, and earlier ones are recomputed."""

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.verification.step import Outcome, StepPlan, slots_of
from protos.draft_tree import DraftTree
from protos.messages import States, StatesFormat, Verdict
from tests.scenarios.verification import VOCABULARY, text
from tests.unit.cluster.verification.test_hidden_state_sender import (
    SMALL,
    WIDE,
    StatesHarness,
    check,
    check_preempted_sessions_go_on,
    to_drafter,
)

PROMPT = tuple(range(1, 14))
LONGER = (*PROMPT, 20, 21)


class RecomputeHarness(StatesHarness):
    """Harness with an engine that keeps only its latest step's states, and fails on reads of others."""

    def __init__(self, layout: StatesFormat = SMALL, **limits: Any) -> None:
        super().__init__(layout, keeps_states=False, **limits)
        self._written: set[int] = set()

    def compute(self, plan: StepPlan) -> list[Outcome]:
        if plan.rows:
            self._written = {
                place
                for row in plan.rows
                for place in slots_of(range(row.start, row.start + len(row.tokens)), row.pages, self.limits.page_size)
            }
        return super().compute(plan)

    def _rows_at(self, slots: Sequence[int]) -> bytes:
        assert self._written.issuperset(slots), "these states are gone"
        return super()._rows_at(slots)

    @property
    def recomputed(self) -> int:
        return self.feeds.counts["again"]

    def states_of_steps(self, steps: int, session: str = "s") -> list[States]:
        """Returns all states sent to the drafter, which acknowledges each message."""
        found: list[States] = []
        for _ in range(steps):
            sent = [message for message in to_drafter(self.step()) if isinstance(message, States)]
            for states in [*sent, *self.reads()]:
                found.append(states)
                self.ack(states.end, session)
        return found


def after_four_steps() -> tuple[RecomputeHarness, tuple[int, ...]]:
    """Returns a harness with a session that decoded four tokens without a drafter, and the session's tokens."""
    harness = RecomputeHarness()
    harness.open(tokens=(1, 2, 3), max_len=60)
    for _ in range(4):
        harness.step()
    return harness, (1, 2, 3, *text((1, 2, 3), 4))


def test_states_of_a_step_are_sent_with_its_verdict():
    harness = RecomputeHarness()
    harness.open(tokens=(1, 2, 3))
    harness.attach_from((1, 2, 3), 0)
    first, second = harness.states_of_steps(2)
    assert [(first.first, first.end), (second.first, second.end)] == [(0, 3), (3, 4)]
    check(second, (1, 2, 3, *text((1, 2, 3), 1)))
    assert harness.recomputed == 0


def test_prompt_states_are_sent_after_each_chunk():
    harness = RecomputeHarness(WIDE, max_step_tokens=4, max_context=100)
    harness.open(tokens=PROMPT)
    harness.attach_from(PROMPT, 0)
    found = harness.states_of_steps(4)
    assert [states.first for states in found][:3] == [0, 4, 8]
    for states in found:
        check(states, (*PROMPT, *text(PROMPT, 2)))
    assert found[-1].end == len(PROMPT)
    assert harness.recomputed == 0


def test_a_late_drafter_has_the_text_recomputed():
    harness, tokens = after_four_steps()
    harness.attach_from(tokens, 0)
    assert harness.feeds.next_read() is None
    (states,) = harness.states_of_steps(1)
    assert (states.first, states.end) == (0, len(tokens))
    check(states, tokens)
    assert harness.recomputed == len(tokens) - 1, "the last was not computed yet"
    assert harness.scheduler.counts.known_tokens == len(tokens) + harness.recomputed
    assert harness.rows[-1][0].start == 0


def test_only_missing_states_are_recomputed():
    harness, tokens = after_four_steps()
    harness.attach_from(tokens, len(tokens) - 3)
    (states,) = harness.states_of_steps(1)
    assert (states.first, states.end) == (len(tokens) - 3, len(tokens))
    assert harness.recomputed == 2


def test_no_states_beyond_a_rollback_are_offered_to_a_drafter_that_attaches_again():
    """Otherwise the target would read them forever, because it cannot send them."""
    harness, tokens = after_four_steps()
    harness.attach_from(tokens, 0)
    harness.feeds.before_step()
    harness.attach_from(tokens, len(tokens) - 2)
    assert harness.feeds.next_read() is None
    (states,) = harness.states_of_steps(1)
    assert (states.first, states.end) == (len(tokens) - 2, len(tokens))
    check(states, tokens)


def test_states_of_the_latest_step_are_not_recomputed():
    harness = RecomputeHarness()
    harness.open(tokens=(1, 2, 3), max_len=60)
    harness.step()
    tokens = (1, 2, 3, *text((1, 2, 3), 1))
    harness.attach_from(tokens, 0)
    (states,) = harness.reads()
    assert (states.first, states.end) == (0, 3)
    check(states, tokens)
    assert harness.recomputed == 0


def test_a_prefix_hit_is_recomputed_without_changing_the_text():
    harness = RecomputeHarness()
    harness.open("a", tokens=PROMPT)
    harness.step()
    harness.open("b", tokens=LONGER)
    harness.attach_from(LONGER, 0, "b")
    (states,) = harness.states_of_steps(1, "b")
    assert (states.session, states.first, states.end) == ("b", 0, len(LONGER))
    check(states, LONGER)
    assert harness.recomputed == 12, "the whole pages that were found"


@pytest.mark.parametrize(
    ("by", "first", "recomputed"),
    [(9, 9, 4), (12, 12, 0), (14, 12, 0), (0, 0, 12)],
    ids=["some", "none", "later", "all"],
)
def test_a_prefix_hit_is_recomputed_only_from_where_a_drafter_may_begin(by, first, recomputed):
    harness = RecomputeHarness()
    harness.open("a", tokens=PROMPT)
    harness.step()
    harness.open("b", tokens=LONGER)
    harness.attach_from(LONGER, 0, "b", by=by)
    (states,) = harness.states_of_steps(1, "b")
    assert (states.first, states.end) == (first, len(LONGER))
    check(states, LONGER)
    assert harness.recomputed == recomputed


def test_a_session_that_fills_the_cache_ends_although_states_within_a_shared_page_are_recomputed():
    """A copy of the shared page would need one page more than the cache has."""
    harness = RecomputeHarness(pages=8, page_size=4)
    prompt = tuple(range(28))
    harness.open(tokens=prompt, max_len=32)
    harness.step()
    harness.attach_from((*prompt, *text(prompt, 1)), 5)
    harness.step()
    assert harness.scheduler.next_due() == harness.now
    assert harness.finish() == {"s": text(prompt, 4)[2:]}


def test_a_late_drafter_may_begin_within_the_text():
    harness, tokens = after_four_steps()
    harness.attach_from(tokens, 0, by=4)
    assert harness.feeds.next_read() is None, "of position 4 nothing is there"
    first, second = harness.states_of_steps(2)
    assert (first.first, first.end, second.first) == (4, 7, 7)
    check(second, (*tokens, *text(tokens, 1)))
    assert harness.recomputed == 2


def test_a_late_drafter_begins_earlier_if_states_exist():
    harness = RecomputeHarness()
    harness.open(tokens=PROMPT, max_len=60)
    harness.step()
    tokens = (*PROMPT, *text(PROMPT, 1))
    harness.attach_from(tokens, 2, by=12)
    (states,) = harness.reads()
    assert (states.first, states.end) == (2, len(PROMPT))
    harness.step()
    harness.attach_from(tokens, 0, by=13)
    (states,) = harness.reads()
    assert (states.first, states.end) == (13, 14)
    assert harness.recomputed == 0


def test_a_drafter_late_for_a_chunked_prompt_begins_at_existing_states():
    harness = RecomputeHarness(WIDE, max_step_tokens=4, max_context=100)
    harness.open(tokens=PROMPT)
    harness.step()
    harness.step()
    harness.attach_from(PROMPT, 0, by=10)
    (first,) = harness.reads()
    assert (first.first, first.end) == (4, 8)
    harness.ack(first.end)
    found = harness.states_of_steps(2)
    assert [states.first for states in found] == [8, 12]
    assert found[-1].end == len(PROMPT)
    assert harness.recomputed == 0


def test_before_the_first_send_a_later_beginning_avoids_recomputation():
    harness = RecomputeHarness(max_step_tokens=4, max_context=100)
    harness.open(tokens=PROMPT)
    harness.step()
    harness.step()
    harness.attach_from(PROMPT, 0, by=10)
    (states,) = harness.states_of_steps(1)
    assert (states.first, states.end) == (8, 12)
    assert harness.recomputed == 0


def test_sent_states_have_no_gaps():
    """States not sent in time are recomputed."""
    harness = RecomputeHarness(max_step_tokens=4, max_context=100, window_bytes=1, verdict_states_bytes=0)
    harness.open(tokens=PROMPT)
    harness.attach_from(PROMPT, 0, by=12)
    harness.step()
    (first,) = harness.reads()
    assert (first.first, first.end) == (0, 4)
    harness.step()
    assert list(harness.reads()) == [], "the first are still on their way"
    harness.step()
    harness.ack(first.end)
    harness.step()
    (second,) = harness.reads()
    assert second.first == 4
    assert harness.recomputed > 0


def test_without_a_reading_drafter_nothing_is_recomputed():
    harness = RecomputeHarness()
    harness.open("a", tokens=PROMPT)
    harness.step()
    harness.open("b", tokens=LONGER)
    harness.attach_from(LONGER, None, "b")
    harness.step()
    assert harness.recomputed == 0
    assert harness.rows[-1][-1].start == 12


def test_accepted_nodes_are_read_before_their_move():
    harness = RecomputeHarness(WIDE)
    harness.open(tokens=(1, 2))
    harness.attach_from((1, 2), 0)
    right = text((1, 2), 4)
    tree = DraftTree(((right[0] + 1) % VOCABULARY, right[0], right[1]), (-1, -1, 1))
    harness.block((1, 2), tree)
    (states,) = harness.states_of_steps(1)
    assert (states.first, states.end) == (0, 4)
    check(states, (1, 2, *right[:3]))


def test_states_beyond_a_drafters_capacity_are_recomputed_a_few_times_then_lost():
    harness = RecomputeHarness(window_bytes=1, verdict_states_bytes=0)
    harness.open(tokens=(1, 2, 3), max_len=60)
    harness.attach_from((1, 2, 3), 0)
    harness.step()
    (first,) = harness.reads()
    tokens = (1, 2, 3, *text((1, 2, 3), 1))
    while not harness.feeds.counts["lost"]:
        (verdict,) = [message for message in to_drafter(harness.step()) if isinstance(message, Verdict)]
        tokens += verdict.tokens
        assert list(harness.reads()) == [], "the first states are still in flight"
        assert len(tokens) < 20
    assert 0 < harness.recomputed < 10
    harness.ack(first.end)
    harness.attach_from(tokens, first.end)
    (states,) = harness.states_of_steps(1)
    assert states.first == first.end
    assert harness.feeds.counts["lost"] == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_recomputation_is_counted_only_without_stored_states(keeps):
    assert ("again" in StatesHarness(keeps_states=keeps).feeds.counts) is not keeps


def test_a_preempted_session_resumes_its_states():
    harness = RecomputeHarness(pages=9, max_sessions=2, max_context=24)
    check_preempted_sessions_go_on(harness, steps=80)
    assert harness.feeds.counts["lost"] == 0
