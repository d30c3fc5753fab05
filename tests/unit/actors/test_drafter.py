"""Tests the drafter's loop without its streams."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.drafter import Drafter, MethodFigures, TargetAccess
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.net.streams import Outbox
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.drafting.session_table import DrafterLimits
from cluster.trust import PeerRole
from protos import speculation_pb2 as pb
from protos.codec import Decoded, decode, encode
from protos.draft_tree import DraftTree
from protos.messages import (
    Attach,
    Block,
    Close,
    DraftRequest,
    Hello,
    Identity,
    Message,
    Open,
    Refusal,
    RefusalReason,
    Shape,
    Verdict,
    Welcome,
)
from protos.prefix import Prefix
from tests.toys import ToyRunner
from tests.unit.cluster.samples import KEY, an_open

VOCABULARY = 8
SESSIONS = 2
LIMITS = DrafterLimits(VOCABULARY, 100, SESSIONS)


class InterruptedMethod(DraftModel):
    """Method that lets the test send messages to the drafter while it frees pages."""

    def __init__(self) -> None:
        runner = ToyRunner(torch.eye(VOCABULARY))
        cache = DraftCache(pages=SESSIONS, page_size=8)
        super().__init__(runner, torch.arange(VOCABULARY), cache, DraftingLimits(top_k=2))
        self.closing = threading.Event()
        self.go_on = threading.Event()
        self.proposed: list[dict[str, int]] = []  # tokens of each session's block, by pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = super().draft(requests)
        self.proposed.append({proposal.session: len(proposal.tokens) for proposal in proposals})
        return proposals

    def close(self, sessions: Sequence[str]) -> None:
        self.closing.set()
        assert self.go_on.wait(10)
        super().close(sessions)


class HangingCredentials:
    """Credentials with which every dial to a target hangs."""

    metadata = ()

    def __init__(self) -> None:
        self.dialed: list[str] = []

    def dial(self, address: str, peer: PeerRole) -> "HangingCredentials":
        self.dialed.append(address)
        return self

    async def __aenter__(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def __aexit__(self, *error: object) -> None:
        pass


def a_drafter(
    method: Any, draft_ahead: bool = False, clock: Callable[[], float] = time.monotonic, **more: Any
) -> Drafter:
    access: Any = TargetAccess(credentials=HangingCredentials())  # type: ignore[arg-type]
    return Drafter(method, LIMITS, {"": Identity("v", "m")}, draft_ahead, clock, **{"access": access} | more)


@asynccontextmanager
async def drafting(drafter: Drafter) -> AsyncIterator[tuple[str, Outbox]]:
    """Runs the drafter's loop; yields its router's stream and the pending messages on it."""
    loop = asyncio.create_task(drafter.run())
    yield drafter.router_up(Hello("router", "v", "m"))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await drafter.close()


def to_open(session: str) -> Open:
    return an_open(session, tokens=(1, 2), target_address="t1")


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_sessions_that_change_while_pages_come_back_find_some():
    """A full drafter whose sessions are all replaced at once still has pages for the new sessions' whole blocks."""
    method = InterruptedMethod()
    drafter = a_drafter(method)
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"), to_open("b"))))
        await until(lambda: method.proposed)
        drafter.receive(stream, Decoded((Close("a", 1),)))
        await until(method.closing.is_set)
        drafter.receive(stream, Decoded((Close("b", 1), to_open("c"), to_open("d"))))
        method.go_on.set()
        await until(lambda: {"c": 4, "d": 4} in method.proposed)


async def test_only_known_targets_are_dialed():
    nowhere: Any = HangingCredentials()
    drafter = a_drafter(
        InterruptedMethod(), access=TargetAccess(credentials=nowhere, known=lambda _: frozenset({"t1"}))
    )
    stream, outbox = drafter.router_up(Hello("router", "v", "m"))
    drafter.receive(stream, Decoded((to_open("a"), replace(to_open("b"), target_address="t2"))))
    await until(lambda: nowhere.dialed)
    _, refusal = await outbox.take()
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.reason) == ("b", RefusalReason.OVERLOADED)
    assert drafter.scheduler.refusals.counts.total() == 1
    assert nowhere.dialed == ["t1"]
    await drafter.close()


async def test_an_open_of_an_unknown_model_at_a_known_target_is_only_refused():
    drafter = a_drafter(InterruptedMethod())
    stream, outbox = drafter.router_up(Hello("router", "v", "m"))
    drafter.receive(stream, Decoded((to_open("a"), replace(to_open("b"), model="new"))))
    _, refusal = await outbox.take()
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.reason) == ("b", RefusalReason.OVERLOADED)
    await drafter.close()


async def test_a_malformed_open_is_counted_and_refused_under_its_attempt():
    drafter = a_drafter(InterruptedMethod())
    stream, outbox = drafter.router_up(Hello("router", "v", "m"))
    drafter.receive(stream, decode(pb.RouterToDrafter(opens=[pb.Open(session="s", attempt=5)])))
    welcome, refusal = await outbox.take()
    assert isinstance(welcome, Welcome)
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.attempt, refusal.reason) == ("s", 5, RefusalReason.INVALID)
    assert drafter.refused == {"Open": 1}
    await drafter.close()


class Stateless:
    """Method without state per session."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1

    def open(self, request: Open) -> None: ...

    def committed(self, session: str, tokens: Sequence[int]) -> None: ...

    def close(self, sessions: Sequence[str]) -> None: ...


class OneToken(Stateless):
    """Method that drafts one token per request, immediately or in a forward pass."""

    def __init__(self, at_once: bool = False) -> None:
        self.passes: list[tuple[str, ...]] = []
        self.at_once = at_once

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.passes.append(tuple(each.session for each in requests))
        block = DraftTree.chain((1,))
        return [Proposal(e.session, e.base_len, e.prefix_hash, block, is_at_once=self.at_once) for e in requests]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        raise AssertionError("nobody asked for drafts ahead")


class EndlessMethod(OneToken):
    """Method that drafts ahead until interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = 0
        self.interrupted = threading.Event()
        self.stop = threading.Event()

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        while not interrupted() and not self.stop.is_set():
            self.checks += 1
        self.interrupted.set()
        return []


class EarlyMethod(OneToken):
    """Method that sends a block during its lookahead passes, until the test stops them."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        (request,) = requests
        outcome = (1, 2)
        prefix = Prefix(KEY, (*to_open("a").tokens, *outcome))
        early([Proposal(request.session, prefix.length, prefix.hash, DraftTree.chain((3,)), outcome=outcome)])
        self.stop.wait(10)
        return []


class UnknownSessionMethod(OneToken):
    """Method whose blocks belong to an unknown session."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [replace(proposal, session="unknown") for proposal in super().draft(requests)]


@pytest.mark.parametrize("at_once", [False, True])
async def test_blocks_that_took_no_forward_do_not_count_in_the_cost_of_drafting(at_once):
    method = OneToken(at_once)
    drafter = a_drafter(method, figures=MethodFigures(cost=DraftCost(forward=ForwardCost.linear(0.01))))
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"),)))
        await until(lambda: len(method.passes) == 1)
        drafter.receive("t1", Decoded((Verdict("a", 1, 2, Prefix(KEY, (1, 2)).hash, (3,), 0, 0),)))
        await until(lambda: len(method.passes) == 2)
        drafter.receive(stream, Decoded((Close("a", 1), to_open("b"))))
        await until(lambda: len(method.passes) == 3)
        assert (drafter.timing.pace.count > 0) is not at_once


async def test_a_block_is_sent_when_it_leaves_which_may_be_before_its_pass_ends():
    method = EarlyMethod()
    drafter = a_drafter(method, draft_ahead=True)
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"),)))
        await until(lambda: drafter.scheduler.counts["blocks"] == 2)
        events = drafter.timeline.events()
        assert [event.name for event in events] == ["draft", "drafted", "sent", "draft ahead", "sent"]
        assert {event.sessions for event in events} == {("a",)}
        method.stop.set()


async def test_a_pass_that_brings_no_block_sends_none():
    method = UnknownSessionMethod()
    drafter = a_drafter(method)
    async with drafting(drafter) as (stream, _):
        for session in ("a", "b"):
            drafter.receive(stream, Decoded((to_open(session),)))
            await until(lambda session=session: (session,) in method.passes)
        assert {event.name for event in drafter.timeline.events()} == {"draft", "drafted"}


class FailingMethod(OneToken):
    """Method whose passes fail."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        raise MemoryError("no pages left")


async def test_a_failed_pass_ends_the_loop_with_its_error():
    drafter = a_drafter(FailingMethod())
    loop = asyncio.create_task(drafter.run())
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    await asyncio.sleep(0)
    drafter.receive(stream, Decoded((to_open("a"),)))
    with pytest.raises(MemoryError, match="no pages left"):
        await asyncio.wait_for(loop, 10)
    await drafter.close()


async def test_a_request_interrupts_drafting_ahead_and_nothing_else_does():
    method = EndlessMethod()
    drafter = a_drafter(method, draft_ahead=True)
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"),)))
        await until(lambda: method.checks)
        drafter.receive(stream, Decoded((Close("unknown", 1),)))
        drafter.receive("t1", Decoded((Verdict("unknown", 1, 2, 0, (3,), 0, 0),)))
        checks = method.checks
        await until(lambda: method.checks > checks + 1)
        assert not method.interrupted.is_set()
        drafter.receive(stream, Decoded((to_open("b"),)))
        await until(method.interrupted.is_set)
        await until(lambda: ("b",) in method.passes)
        drafter.receive(stream, Decoded((Close("a", 1), Close("b", 1), to_open("c"))))
        await until(lambda: ("c",) in method.passes)
        method.stop.set()


async def test_weights_are_exchanged_on_the_drafting_thread_and_drafting_ahead_makes_way():
    method = EndlessMethod()
    drafter = a_drafter(method, draft_ahead=True)
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"),)))
        await until(lambda: method.checks)
        assert drafter.timing.read == {"a"}
        threads: list[str] = []

        def exchange() -> str:
            assert method.interrupted.is_set(), "a pass goes on"
            threads.append(threading.current_thread().name)
            return "earlier"

        assert await drafter.exchange(exchange, 3, published_acceptance=0.8) == "earlier"
        assert threads[0].startswith("drafting")
        assert drafter.version_watch.version == 3
        assert drafter.scheduler.sessions.load_check.expected == 0.8
        assert not drafter.timing.read, "all prompts are read again"
        method.stop.set()


class TargetStream:
    """One connection to a target: the channel, its stream, and the messages received on it."""

    def __init__(self, closed: asyncio.Event) -> None:
        self.received: list[Message] = []
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closing = False
        self.is_closed = False
        self._closed = closed

    @property
    def has_attached(self) -> bool:
        return any(isinstance(message, Attach) for message in self.received)

    async def __aenter__(self) -> "TargetStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_closing = True
        await self._closed.wait()
        self.is_closed = True

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., "TargetStream"]:
        return lambda **metadata: self

    unary_unary = stream_stream

    async def write(self, frame: Any) -> None:
        self.received += decode(frame).messages

    async def read(self) -> Any:
        return encode(pb.TargetToDrafter, await self.sent.get())

    def send(self, *messages: Message) -> None:
        self.sent.put_nowait(messages)


class SlowlyClosing:
    """Credentials of a target that welcomes every caller, and whose connections take time to close."""

    metadata = ()

    def __init__(self) -> None:
        self.streams: list[TargetStream] = []
        self.closed = asyncio.Event()

    def dial(self, address: str, peer: PeerRole) -> TargetStream:
        stream = TargetStream(self.closed)
        stream.send(Welcome("target"))
        self.streams.append(stream)
        return stream


async def test_the_end_of_an_unused_connection_does_not_detach_sessions_on_the_next_one():
    target: Any = SlowlyClosing()
    drafter = a_drafter(OneToken(), access=TargetAccess(credentials=target))
    async with drafting(drafter) as (router, _):
        drafter.receive(router, Decoded((to_open("a"),)))
        await until(lambda: len(target.streams) == 1 and target.streams[0].has_attached)
        drafter.receive(router, Decoded((Close("a", 1),)))
        await until(lambda: target.streams[0].is_closing)
        drafter.receive(router, Decoded((to_open("b"),)))
        await until(lambda: len(target.streams) == 2 and target.streams[1].has_attached)
        target.closed.set()
        await until(lambda: target.streams[0].is_closed)
        prefix = Prefix(KEY, (1, 2))
        verdict = Verdict("b", 1, prefix.length, prefix.hash, (3,), 0, 0)
        prefix.append(3)
        target.streams[1].send(verdict, DraftRequest("b", 1, prefix.length, prefix.hash, 4))
        await until(lambda: any(isinstance(m, Block) and m.base_len == 3 for m in target.streams[1].received))
