"""Sends mutated frames to each service without sockets, and checks that an honest session is unaffected.

Each hostile peer is authenticated in some role. It sends the bytes of valid frames with some changed, joined or cut.
Undecodable bytes end its stream, as on the wire.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from hypothesis import strategies as st

from actors.drafter import Drafter
from actors.drafters.lookup.ngram import NgramDraft
from actors.net.streams import InvalidFrame, decode_after_greeting
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig
from cluster.drafting.method import make_pass
from cluster.drafting.session_table import DrafterLimits
from cluster.routing.ledger import CommittedTokens, Event, Generation, Session
from cluster.routing.session_router import Assignment, Ready, SessionRouter
from cluster.trust import issue
from cluster.verification.block_buffer import BufferLimits
from cluster.verification.scheduler import VerificationLimits
from cluster.verification.step import Outcome, StepPlan
from protos import speculation_pb2 as pb
from protos.codec import Decoded, decode, encode
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import (
    Acceptance,
    AssignmentToken,
    Attach,
    Block,
    Close,
    Collapse,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    Identity,
    Leaving,
    LiveSession,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Scoring,
    StateDtype,
    States,
    StatesAck,
    TokenRules,
    TokenScore,
    Verdict,
    Welcome,
)
from protos.prefix import Prefix

KEY = 99
SECRET = b"secret of the honest router"
VOCABULARY = 50
PROMPT = (1, 2, 3)
HONEST = "honest"
NAMES = (HONEST, "a", "b", "c")
TARGET = "10.0.0.1:1"
HOSTILE = "10.0.0.2:2"
NAMED = {"router": "hostile-router", "drafter": "honest-router"}  # router names reach drafters
TOKENS = 12  # length of the honest session

FrameType = type[ProtoMessage]
TO_TARGET: dict[FrameType, str] = {
    pb.RouterToTarget: "router",
    pb.DrafterToTarget: "drafter",
    pb.DrafterToTargetStates: "drafter",
}
TO_DRAFTER: dict[FrameType, str] = {
    pb.RouterToDrafter: "router",
    pb.TargetToDrafter: "target",
    pb.TargetToDrafterStates: "target",
}
TO_ROUTER: dict[FrameType, str] = {pb.DrafterToRouter: "drafter", pb.TargetToRouter: "target"}


@dataclass(frozen=True)
class Sent:
    """Bytes that a hostile peer sends on a stream of one frame type."""

    frame: FrameType
    data: bytes

    def decoded(self) -> Decoded | None:
        """Returns the decoded message, or None if it ends the stream."""
        try:
            return decode_after_greeting(self.frame.FromString(self.data))
        except (DecodeError, InvalidFrame):
            return None


def an_open(session: str, **changes: Any) -> Open:
    made = Open(session, 1, PROMPT, 3, 3 + TOKENS, (0,), Sampling(0.0), 1, 0, KEY, Acceptance.COUPLED, 4, HOSTILE)
    return replace(made, **changes)


def _sensible(session: str) -> dict[FrameType, list[Message]]:
    """Returns valid messages about a session for mutation, by frame type."""
    here = Prefix(KEY, PROMPT).hash
    hello = Hello("hostile", "v", "m", (LiveSession(session, 1),))
    welcome = Welcome("hostile")
    opens = [
        an_open(session),
        an_open(session, attempt=7, sampling=Sampling(), acceptance=Acceptance.REJECTION),
        an_open(session, audit=True, draft_tokens=0, token_key=b"k"),
        an_open(session, assignment_token=AssignmentToken(1, bytes(16))),
        an_open(session, attempt=2, grammar="g"),
        an_open(session, audit=True, draft_tokens=0, max_len=4, rival=5),
        an_open(session, rules=TokenRules(((5, 1.5),), (5, 6, 7), ((5, 6), (7,)), 5), priority=-1, cache_salt="salt"),
        an_open(session, scoring=Scoring(2, 3), wants_rejected=True),
    ]
    closes = [Close(session, 9)]
    probs = SparseProbs(((5, 6),), ((3, 4),))
    blocks = [
        Block(session, 3, here, DraftTree.chain((5,), probs)),
        Block(session, 3, here, DraftTree((5, 6, 7), (-1, -1, 0))),
        Block(session, 4, here + 1, DraftTree.chain((5, 6, 7))),
    ]
    attaches = [Attach(session, 3, here, 0), Attach(session, 3, here, None, issue(SECRET, "other", 1))]
    scores = (TokenScore(-1.0, 1, (5,), (-1.0,)),)
    verdicts = [
        Verdict(session, 1, 3, here, (5, 6), 1, 2, Finish.NONE, DraftAnswer.GIVEN),
        Verdict(session, 1, 3, here, (5,), 0, 0, Finish.STOP, DraftAnswer.MISSED, Collapse(0.5), 1.0),
        Verdict(session, 1, 3, here, (5,), 0, 2, scores=scores, prompt_scores=scores * 2, rejected=(6,)),
    ]
    refusals = [Refusal(session, 1, RefusalReason.OVERLOADED, "full"), Refusal(session, 1, RefusalReason.INVALID, "")]
    resyncs = [Resync(session, 3, here)]
    states = [States(session, 0, here, StateDtype.BFLOAT16, 2, bytes(12))]
    return {
        pb.RouterToTarget: [hello, *opens, *closes],
        pb.DrafterToTarget: [hello, Detach(session), *attaches, *blocks, NoDraft(session, 3, here)],
        pb.DrafterToTargetStates: [hello, StatesAck(session, 2)],
        pb.RouterToDrafter: [hello, *opens, *closes],
        pb.TargetToDrafter: [welcome, *verdicts, *states, DraftRequest(session, 1, 3, here), *resyncs],
        pb.TargetToDrafterStates: [welcome, *states],
        pb.DrafterToRouter: [welcome, *resyncs, *refusals, Leaving()],
        pb.TargetToRouter: [welcome, *verdicts, *refusals, Leaving()],
    }


SENSIBLE = {
    frame: [encode(frame, [message]).SerializeToString() for name in NAMES for message in _sensible(name)[frame]]
    for frame in (*TO_TARGET, *TO_DRAFTER, *TO_ROUTER)
}


@st.composite
def mutated(draw: st.DrawFn, frames: Sequence[FrameType]) -> Sent:
    """Generates a frame of one or two valid messages with up to four changes."""
    frame = draw(st.sampled_from(frames))
    data = bytearray(draw(st.sampled_from(SENSIBLE[frame])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("set", "insert", "cut", "join", "end"))):
            case "set" if data:
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case "end":
                del data[at:]
            case _:
                data += draw(st.sampled_from(SENSIBLE[frame]))
    return Sent(frame, bytes(data))


@contextmanager
def unlogged() -> Iterator[None]:
    """Suppresses log lines about hostile peers."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# ---------------------------------------------------------------- the target


class OneToken:
    """Fake engine that counts up from the last token and accepts no draft."""

    def __init__(self) -> None:
        self.open: dict[str, Open] = {}

    def step(self, plan: StepPlan) -> list[Outcome]:
        for name in plan.closes:
            del self.open[name]
        self.open |= {request.session: request for request in plan.opens}
        assert all(row.session in self.open for row in plan.rows)
        return [Outcome(row.session, (), (row.base_len + 1) % VOCABULARY) for row in plan.rows if row.decide]

    async def prepare(self, grammar: str) -> str | None:
        """Yields to the event loop so that messages arrive; accepts any grammar and enforces none."""
        await asyncio.sleep(0)
        return None if grammar.isalpha() else "it is no word"


def at_target(sent: Sequence[Sent]) -> None:
    """Sends hostile routers' and drafters' frames to a target, each followed by a step; checks for leaks at the end."""
    asyncio.run(_at_target(sent))


async def _at_target(sent: Sequence[Sent]) -> None:
    unseen: list[dict[str, Any]] = []  # exceptions of unawaited tasks
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    now = 0.0
    buffer = BufferLimits(blocks=4, sessions=3, bytes=2000, age_s=5)
    limits = VerificationLimits(VOCABULARY, 40, 3, 32, pages=40, page_size=4, max_queued=5, buffer=buffer)
    engine = OneToken()
    target = TargetReplica(engine, limits, "v", "m", 30, clock=lambda: now)  # type: ignore[arg-type]
    scheduler = target.scheduler
    up = {"router": target.router_up, "drafter": target.drafter_up}
    streams = {role: begin(Hello(NAMED[role], "v", "m"))[0] for role, begin in up.items()}
    router, outbox = target.router_up(Hello("honest-router", "v", "m"))
    request = an_open(HONEST, token_key=SECRET, draft_tokens=0, grammar="honest")  # pending while other frames arrive
    target.receive(router, decode(encode(pb.RouterToTarget, [request])))

    def step() -> bool:
        plan = scheduler.plan(now)
        if plan is not None:
            target._send(scheduler.apply(engine.step(plan), 0.01, now))
        return plan is not None

    for item in sent:
        role = TO_TARGET[item.frame]
        frame = item.decoded()
        if frame is None:
            target.stream_down(streams[role])
            streams[role], _ = up[role](Hello(NAMED[role], "v", "m"))
        else:
            target.receive(streams[role], frame)
        await asyncio.sleep(0)  # a task admits sessions with a grammar
        step()
        now += 0.01
    for _ in range(2):
        await asyncio.sleep(0)  # compiles the last grammars
    for _ in range(2000):
        if not step():
            break
        now += 0.01
    verdicts = [message for message in outbox._due if isinstance(message, Verdict)]
    tokens = tuple(token for verdict in verdicts for token in verdict.tokens)
    assert tokens == tuple(range(len(PROMPT) + 1, len(PROMPT) + 1 + TOKENS)), "the honest session came to its end"
    for stream in (*streams.values(), router):
        target.stream_down(stream)
    now += 100.0
    for _ in range(3):
        step()
    await asyncio.sleep(0)  # ends the tasks of dropped sessions
    assert not unseen
    assert target.is_idle
    scheduler.admission.pages.check()
    assert not engine.open
    assert not target._outboxes
    early = scheduler._early
    assert not any((early._waiting, early._drafters, early._sessions, +early._bytes))
    assert early._all_bytes == 0


# ---------------------------------------------------------------- the drafter


class UnconnectedDrafter(Drafter):
    """Drafter that dials no target."""

    def _dial(self, address: str, target: Identity) -> None:
        pass


def at_drafter(sent: Sequence[Sent]) -> None:
    """Sends frames of hostile routers and their hostile target to a drafter, each followed by a drafting pass."""
    method = NgramDraft(4, 1)
    drafter = UnconnectedDrafter(method, DrafterLimits(VOCABULARY, 40, 4), {"": Identity("v", "m")}, clock=lambda: 0.0)
    honest, _ = drafter.router_up(Hello("honest-router", "v", "m"))
    request = an_open(HONEST, target_address=TARGET, stop_ids=())
    drafter.receive(honest, decode(encode(pb.RouterToDrafter, [request])))
    hostile, _ = drafter.router_up(Hello("hostile-router", "v", "m"))

    def draft() -> None:
        drafting = drafter.scheduler.next_pass(4, 4)
        if not drafting.is_empty:
            drafter._queue_proposals(make_pass(method, drafting, lambda: True))

    prefix = Prefix(KEY, PROMPT)
    for number, item in enumerate(sent):
        frame = item.decoded()
        if frame is not None:
            drafter.receive(hostile if TO_DRAFTER[item.frame] == "router" else HOSTILE, frame)
        elif TO_DRAFTER[item.frame] == "router":
            drafter.router_down(hostile)
            hostile, _ = drafter.router_up(Hello("hostile-router", "v", "m"))
        else:
            drafter.scheduler.gone(HOSTILE)
        draft()
        if len(prefix) < 3 + TOKENS - 1:
            verdict = Verdict(HONEST, 1, len(prefix), prefix.hash, (number % 7,), 0, 0)
            prefix.extend(verdict.tokens)
            drafter.receive(TARGET, decode(encode(pb.TargetToDrafter, [verdict])))
    session = drafter.scheduler.sessions.all[HONEST]
    assert (tuple(session.prefix.tokens), session.router) == (tuple(prefix.tokens), honest)
    for stream in (hostile, honest):
        drafter.router_down(stream)
    draft()
    assert drafter.is_idle
    assert not drafter._routers
    assert not method._texts


# ---------------------------------------------------------------- the router


def at_router(sent: Sequence[Sent]) -> None:
    """Sends frames of an unassigned target and drafter to a router; they may fail only their own sessions."""
    events: list[Event] = []
    assignments: SessionRouter[Assignment] = SessionRouter("router", 60.0)

    def keep(ready: Ready[Assignment]) -> None:
        events.extend(event for _, event in ready.events)

    audits = Audits(AuditConfig(share=1.0), "float32", lambda _: None)
    assignments.targets.up(TARGET)
    generation = Generation(
        HONEST, PROMPT, 3 + TOKENS, (), Sampling(0.0), 1, 2, 0, KEY, Acceptance.COUPLED, draft_tokens=4
    )
    assignment = Assignment(Session(generation, SECRET), 0.0)
    keep(assignments.add(assignment, 0.0))
    assignments.targets.up(HOSTILE)
    prefix = Prefix(KEY, PROMPT)
    decided: list[int] = []
    for number, item in enumerate(sent):
        frame = item.decoded()
        if frame is not None:
            for message in frame.messages:
                keep(assignments.receive(HOSTILE, [message], 0.0))
                audits.receive(HOSTILE, message, 0.0)
            for bad in frame.malformed:
                keep(assignments.unreadable(HOSTILE, bad.session, bad.attempt, 0.0))
                audits.unreadable(HOSTILE, bad.session)
        else:
            keep(assignments.gone(HOSTILE, 0.0))
            audits.gone(HOSTILE)
            assignments.targets.up(HOSTILE)
        if len(prefix) < 3 + TOKENS - 1:
            token = number % 7
            keep(assignments.receive(TARGET, [Verdict(HONEST, 1, len(prefix), prefix.hash, (token,), 0, 0)], 0.0))
            prefix.extend((token,))
            decided.append(token)
    assert [token for event in events if isinstance(event, CommittedTokens) for token in event.tokens] == decided
    assert all(isinstance(event, CommittedTokens) for event in events)
    assignments.cancel(assignment)
    assert not assignments
    assert not assignments.awaits_tick
