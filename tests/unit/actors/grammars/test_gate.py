"""Sessions with grammars reach the target once compiled, unless they have already ended."""

import asyncio
import logging
from dataclasses import replace

import pytest

from actors.target import GrammarGate, TargetReplica
from cluster.trust import Refusals, ownership_refusal
from cluster.verification.scheduler import STOPPING_MESSAGE, VerificationLimits
from protos.codec import Decoded
from protos.messages import Close, Hello, Leaving, LiveSession, Refusal, RefusalReason, Welcome
from tests.unit.actors.sampling.processor_opens import opened


class Target:
    """Target that compiles on the test's signal, and records admitted sessions."""

    def __init__(self):
        self.compiled = {}
        self.admitted = []
        self.refused = []
        self.routers = {}  # of admitted sessions
        self.refusals = Refusals(logging.getLogger(__name__))
        self.gate = GrammarGate(self.prepare, self.release, self.routers.get, self.refusals, limit=3)

    async def prepare(self, grammar):
        return await asyncio.shield(self.compiled.setdefault(grammar, asyncio.get_running_loop().create_future()))

    def intercept(self, stream, message):
        """Returns False if the target must process the message."""
        answers = self.gate.intercept(stream, message)
        for answer in answers or ():
            self.release(*answer)
        return answers is not None

    def release(self, stream, answer):
        if isinstance(answer, Refusal):
            self.refused.append((stream, answer.session, answer.attempt, answer.reason, answer.message))
        else:
            self.admitted.append((stream, answer))

    async def ends(self, grammar, why=None):
        await asyncio.sleep(0)
        if not self.compiled[grammar].done():
            self.compiled[grammar].set_result(why)
        for _ in range(3):
            await asyncio.sleep(0)


REQUEST = opened(grammar="g")


async def test_a_session_is_admitted_once_its_grammar_is_compiled():
    target = Target()
    assert target.intercept("r", REQUEST)
    await asyncio.sleep(0)
    assert target.admitted == []
    assert not target.gate.is_empty
    await target.ends("g")
    assert target.admitted == [("r", REQUEST)]
    assert target.gate.is_empty


async def test_sessions_without_grammars_pass_at_once():
    target = Target()
    for message in (opened(), Hello("r", "v", "t"), Close("s", 1)):
        assert not target.intercept("r", message)
    assert target.gate.is_empty


async def test_a_failed_grammar_refuses_only_its_session():
    target = Target()
    other = replace(REQUEST, session="other", grammar="good")
    assert target.intercept("r", REQUEST)
    assert target.intercept("r", other)
    await target.ends("g", "it is malformed")
    await target.ends("good")
    assert target.refused == [("r", "s", 1, RefusalReason.INVALID, "cannot enforce the grammar: it is malformed")]
    assert target.admitted == [("r", other)]


async def test_a_session_lost_during_compilation_is_never_admitted():
    target = Target()
    for name in ("closed", "gone"):
        assert target.intercept(name, replace(REQUEST, session=name))
    await asyncio.sleep(0)  # both grammars are compiling
    assert not target.intercept("closed", Close("closed", 1))
    target.gate.on_disconnect("gone")
    assert target.gate.is_empty
    await target.ends("g")
    assert target.admitted == []


async def test_the_later_of_two_attempts_counts_in_any_order():
    target = Target()
    later = replace(REQUEST, attempt=2)
    assert target.intercept("r", REQUEST)
    assert target.intercept("r", later)
    assert not target.intercept("r", Close("s", 1))  # closes the first attempt; the second continues
    await target.ends("g")
    assert target.admitted == [("r", later)]


async def test_an_attempt_that_is_held_or_an_older_one_changes_nothing():
    target = Target()
    held = replace(REQUEST, attempt=2)
    assert target.intercept("r", held)
    for attempt in (1, 2):
        assert target.intercept("r", replace(REQUEST, attempt=attempt, seed=9))
        assert target.intercept("r", replace(REQUEST, attempt=attempt, grammar=""))
    await target.ends("g")
    assert target.admitted == [("r", held)]
    assert target.refused == []


async def test_a_later_attempt_without_a_grammar_passes_at_once_and_alone():
    target = Target()
    assert target.intercept("r", REQUEST)
    await asyncio.sleep(0)
    assert not target.intercept("r", replace(REQUEST, attempt=2, grammar=""))
    assert target.gate.is_empty
    await target.ends("g")
    assert target.admitted == []


@pytest.mark.parametrize("attempt", [1, 2, 3], ids=["older", "equal", "later"])
@pytest.mark.parametrize("grammar", ["", "g", "other"])
async def test_another_routers_open_of_a_held_session_is_not_permitted(attempt, grammar):
    target = Target()
    held = replace(REQUEST, attempt=2)
    theirs = replace(REQUEST, attempt=attempt, grammar=grammar)
    assert target.intercept("r", held)
    assert target.intercept("stranger", theirs)
    no = ownership_refusal(theirs)
    assert target.refused == [("stranger", "s", attempt, no.reason, no.message)]
    assert target.refusals.counts == {"an Open of another router's session": 1}
    await target.ends("g")
    assert target.admitted == [("r", held)]
    assert list(target.compiled) == ["g"], "nothing is compiled for a stranger"


async def test_another_router_closes_no_held_session():
    target = Target()
    assert target.intercept("r", REQUEST)
    assert not target.intercept("stranger", Close("s", 9))
    await target.ends("g")
    assert target.admitted == [("r", REQUEST)]


async def test_an_admitted_session_is_held_only_for_its_own_router():
    """The target refuses another router's Open; holding it would block the session's own router."""
    target = Target()
    target.routers["s"] = "r"
    later = replace(REQUEST, attempt=2)
    assert not target.intercept("stranger", later)
    assert target.gate.is_empty
    assert target.intercept("r", later)
    await target.ends("g")
    assert target.admitted == [("r", later)]


async def test_a_router_that_comes_back_keeps_the_sessions_that_it_lists():
    """This also holds after its older stream is reported broken; answers go to the new stream."""
    target = Target()
    for name in ("listed", "unlisted", "of another attempt"):
        assert target.intercept("r#1", replace(REQUEST, session=name, attempt=2))
    target.gate.on_hello("r#2", Hello("r", "v", "m", (LiveSession("listed", 2), LiveSession("of another attempt", 3))))
    target.gate.on_disconnect("r#1")
    target.intercept("r#1", Close("listed", 2))
    await target.ends("g")
    assert [(stream, request.session) for stream, request in target.admitted] == [("r#2", "listed")]
    assert target.gate.is_empty


async def test_a_router_claims_no_session_of_another():
    target = Target()
    assert target.intercept("r#1", REQUEST)
    target.gate.on_hello("stranger#2", Hello("stranger", "v", "m", (LiveSession("s", 1),)))
    target.gate.on_disconnect("stranger#2")
    await target.ends("g")
    assert target.admitted == [("r#1", REQUEST)]


async def test_held_sessions_are_limited_by_the_queue():
    target = Target()
    for name in ("a", "b", "c"):
        assert target.intercept("r", replace(REQUEST, session=name))
    assert target.intercept("r", replace(REQUEST, session="d"))
    assert target.refused == [("r", "d", 1, RefusalReason.OVERLOADED, "3 sessions wait for their grammars already")]
    assert target.intercept("r", replace(REQUEST, session="c", attempt=2))
    await target.ends("g")
    assert [(request.session, request.attempt) for _, request in target.admitted] == [("a", 1), ("b", 1), ("c", 2)]


async def test_a_dropped_session_is_never_admitted_even_if_its_grammar_compiles():
    """An engine may finish an obsolete grammar while another attempt is held."""
    target = Target()

    async def prepare(grammar):
        try:
            return await Target.prepare(target, grammar)
        except asyncio.CancelledError:
            return None

    target.gate = GrammarGate(prepare, target.release, target.routers.get, target.refusals, limit=3)
    assert target.intercept("r", REQUEST)
    await asyncio.sleep(0)  # the grammar is compiling
    later = replace(REQUEST, attempt=2, grammar="other")
    assert target.intercept("r", later)
    await target.ends("g")
    assert target.admitted == []
    await target.ends("other")
    assert target.admitted == [("r", later)]


async def test_a_session_has_one_owner_while_held_and_after_admission():
    """The session's router reconnects during compilation; a stranger requests the session before and after."""
    target = Target()
    limits = VerificationLimits(50, max_context=1000, max_sessions=4, max_step_tokens=64, max_queued=1)
    replica = TargetReplica(target, limits, "v", "m", step_timeout_s=30)
    old, _ = replica.router_up(Hello("r", "v", "m"))
    other, outbox = replica.router_up(Hello("stranger", "v", "m"))
    replica.receive(old, Decoded((REQUEST,)))
    new, _ = replica.router_up(Hello("r", "v", "m", (LiveSession("s", 1),)))
    replica.stream_down(old)
    theirs = replace(REQUEST, attempt=2)
    replica.receive(other, Decoded((theirs, replace(theirs, session="one too many"))))
    await target.ends("g")
    replica.receive(other, Decoded((theirs,)))
    assert replica.scheduler.admission.router_of("s") == new
    _, *refused = await outbox.take()
    full = Refusal("one too many", 2, RefusalReason.OVERLOADED, "1 sessions wait for their grammars already")
    assert refused == [ownership_refusal(theirs), full, ownership_refusal(theirs)]
    assert replica.scheduler.refusals.counts == {"an Open of another router's session": 2}


async def test_a_target_that_leaves_refuses_the_sessions_that_wait_for_grammars():
    """A router would otherwise see a lost target, because the target ends before it has compiled the grammar."""
    target = Target()
    limits = VerificationLimits(50, max_context=1000, max_sessions=4, max_step_tokens=64)
    replica = TargetReplica(target, limits, "v", "m", step_timeout_s=30)
    router, outbox = replica.router_up(Hello("r", "v", "m"))
    replica.receive(router, Decoded((REQUEST,)))
    loop = asyncio.create_task(replica.run())
    await replica.leave(10)
    replica.receive(router, Decoded((replace(REQUEST, session="later"),)))
    refusals = [Refusal(name, 1, RefusalReason.OVERLOADED, STOPPING_MESSAGE) for name in ("s", "later")]
    assert [each for each in await outbox.take() if not isinstance(each, Welcome | Leaving)] == refusals
    assert replica.is_idle
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
