"""Random events never change a session's text or keep it from ending, even if the cache is too small for all sessions.

Routers open and close sessions, and drafters attach, detach, send blocks and acknowledge hidden states, between and
during steps. The number in a test's id is the seed of its schedule.
"""

import random
from dataclasses import dataclass, replace

import pytest

from cluster.envelope import Send, states_stream
from protos.messages import Attach, Detach, Finish, States, StatesAck, Verdict
from protos.prefix import Prefix
from tests.scenarios.transcript import Tokens
from tests.scenarios.verification import DRAFTER, ROUTER, VOCABULARY, Target, text
from tests.unit.cluster.samples import KEY
from tests.unit.cluster.verification.test_hidden_state_sender import OTHER, StatesHarness, check
from tests.unit.cluster.verification.test_preemption import a_likely_tree
from tests.unit.cluster.verification.test_state_recompute import RecomputeHarness

SEEDS = 60
MAX_OPEN = 6
MAX_STEPS = 1000  # far more than open sessions need to end
PREFIXES = (tuple(range(1, 9)) * 10, (9,) * 80)  # prompts share these, so sessions share pages
TARGETS = {"none": Target, "kept": StatesHarness, "recomputed": RecomputeHarness}


@dataclass
class Session:
    """A session as its router and its drafter know it."""

    prompt: Tokens
    max_len: int
    text: Tokens
    drafter: str | None = None  # drafter that reads hidden states
    states_from: int = 0  # first position whose hidden state the drafter lacks
    states_by: int = 0  # latest acceptable start of the next hidden states


class RandomSchedule:
    """Runs random events on a target, and checks the messages that it sends."""

    def __init__(self, kind: type[Target], seed: int) -> None:
        self._rng = random.Random(seed)
        pages = self._rng.choice((6, 8, 12, 20))
        self._max_context = 4 * pages
        self._target = kind(
            asked=self._rng.choice((None, 2, 3)),
            pages=pages,
            page_size=4,
            max_context=self._max_context,
            max_sessions=self._rng.randint(1, 4),
            max_step_tokens=self._rng.choice((8, 16, 64)),
            window_bytes=self._rng.choice((None, 4, 20)),
            verdict_states_bytes=self._rng.choice((None, 0, 16)),
        )
        self._sessions: dict[str, Session] = {}  # open sessions
        self._opened = 0

    def run(self) -> None:
        for _ in range(self._rng.randint(20, 60)):
            self._step(max_events=4)
        for _ in range(MAX_STEPS):
            if self._target.scheduler.is_idle:
                break
            self._step(max_events=0)
        assert not [*self._sessions], "these sessions do not end"
        assert self._target.scheduler.is_idle
        self._target.scheduler.admission.pages.check()
        assert not self._target.known, "the engine still remembers a session"

    def _step(self, max_events: int) -> None:
        """Runs a step, if one is due, with random events before and during it.

        Settles the previous step after planning this one where the scheduler allows it, else before.
        """
        target = self._target
        if target.scheduler.settles_first or self._rng.random() < 0.5:
            self._check(target.scheduler.settle())
            self._run_events(max_events)
            self._read_states()
        plan = target.scheduler.plan(target.now)
        self._check(target.scheduler.settle())
        self._run_events(max_events)
        if plan is not None:
            outcomes = target.compute(plan)
            target.now += 0.1
            target.scheduler.commit(outcomes, 0.1, target.now)

    # ------------------------------------------------------------ events

    def _run_events(self, max_events: int) -> None:
        for _ in range(self._rng.randint(0, max_events)):
            if len(self._sessions) < MAX_OPEN and self._rng.random() < 0.3:
                self._open()
            elif self._sessions:
                events = {self._close: 1, self._attach: 3, self._detach: 1, self._send_block: 6, self._acknowledge: 2}
                (event,) = self._rng.choices([*events], [*events.values()])
                event(self._rng.choice([*self._sessions]))

    def _open(self) -> None:
        length = self._rng.randrange(1, self._max_context)
        prompt = (*self._rng.choice(PREFIXES)[: length - 1], self._rng.randrange(VOCABULARY))
        max_len = min(self._max_context, length + self._rng.randint(1, 40))
        name = f"s{self._opened}"
        self._opened += 1
        self._sessions[name] = Session(prompt, max_len, prompt)
        self._target.open(
            name,
            tokens=prompt,
            max_len=max_len,
            draft_tokens=self._rng.choice((0, 5)),
            priority=self._rng.randint(0, 1),
        )

    def _close(self, name: str) -> None:
        self._target.close(name)
        del self._sessions[name]

    def _attach(self, name: str) -> None:
        """Attaches a drafter that may lack the last tokens, and has the hidden states of the first ones."""
        session = self._sessions[name]
        drafter = self._rng.choice((DRAFTER, OTHER))
        known = session.text
        if self._rng.random() < 0.3:
            known = known[: self._rng.randint(len(session.prompt), len(known))]
        attach = Attach(name, len(known), Prefix(KEY, known).hash)
        session.drafter = None
        if self._rng.random() < 0.9:
            session.drafter = drafter
            session.states_from = session.states_by = self._rng.randint(0, len(known))
            if self._rng.random() < 0.5:
                session.states_by = self._rng.randint(session.states_from, len(known))
            attach = replace(attach, states_from=session.states_from, states_by=session.states_by)
        self._target.scheduler.receive(drafter, attach, self._target.now)

    def _detach(self, name: str) -> None:
        session = self._sessions[name]
        if session.drafter is not None:
            self._target.scheduler.receive(session.drafter, Detach(name), self._target.now)
            session.drafter = None

    def _send_block(self, name: str) -> None:
        """Sends a block that continues the text, a shorter one, or one drafted ahead."""
        known = self._sessions[name].text
        ahead = known + text(known, 2)
        before = ahead[: len(known) + self._rng.choice((-1, 0, 0, 0, 1, 2))]
        self._target.block(before, a_likely_tree(self._rng, before, self._rng.randint(1, 5)), name)

    def _acknowledge(self, name: str) -> None:
        session = self._sessions[name]
        if session.drafter is not None:
            ack = StatesAck(name, session.states_from)
            self._target.scheduler.receive(session.drafter, ack, self._target.now)

    def _read_states(self) -> None:
        if isinstance(self._target, StatesHarness):
            for _ in range(self._rng.randint(0, 3)):
                self._check(self._target.read())

    # ------------------------------------------------------------ messages of the target

    def _check(self, sends: list[Send]) -> None:
        for receiver, message in sends:
            if isinstance(message, Verdict) and receiver == ROUTER and message.session in self._sessions:
                self._check_verdict(message)
        for receiver, message in sends:
            if isinstance(message, States) and message.session in self._sessions:
                self._check_states(receiver, message)

    def _check_verdict(self, verdict: Verdict) -> None:
        session = self._sessions[verdict.session]
        assert verdict.base_len == len(session.text)
        session.text += verdict.tokens
        assert session.text == session.prompt + text(session.prompt, len(session.text) - len(session.prompt))
        if verdict.finish is not Finish.NONE:
            assert len(session.text) == session.max_len
            del self._sessions[verdict.session]

    def _check_states(self, receiver: str, states: States) -> None:
        session = self._sessions[states.session]
        assert session.drafter is not None
        assert receiver in (session.drafter, states_stream(session.drafter))
        assert session.states_from <= states.first <= session.states_by, "states are missing, or sent twice"
        check(states, session.text)
        session.states_from = session.states_by = states.end
        if receiver == states_stream(session.drafter) and self._rng.random() < 0.8:
            self._acknowledge(states.session)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("states", TARGETS)
def test_every_session_ends_with_its_text_despite_random_events(states: str, seed: int) -> None:
    RandomSchedule(TARGETS[states], seed).run()
