"""The drafter's loop, without its streams."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.drafter import Drafter, MethodFigures, TargetAccess
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.models.decoder import ToyRunner
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_table import DrafterLimits
from protos import speculation_pb2 as pb
from protos.codec import Decoded, decode
from protos.draft_tree import DraftTree
from protos.messages import Close, DraftRequest, Hello, Open, Refusal, RefusalReason, Shape, Verdict, Welcome
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

VOCABULARY = 8
SESSIONS = 2
LIMITS = DrafterLimits(VOCABULARY, 100, SESSIONS)


class InterruptedMethod(DraftModel):
    """Lets the test say something to the drafter while pages are being given back."""

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


class OfflineDrafter(Drafter):
    """Dials nobody."""

    def _dial(self, address: str) -> None:
        pass


def a_drafter(method: Any, draft_ahead: bool = False) -> OfflineDrafter:
    return OfflineDrafter(method, LIMITS, "v", "m", draft_ahead)


def to_open(session: str) -> Open:
    return an_open(session, tokens=(1, 2), target_address="t1")


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_sessions_that_change_while_pages_come_back_find_some():
    """A full drafter whose sessions are all replaced at once still has pages for the new ones' whole blocks."""
    method = InterruptedMethod()
    drafter = a_drafter(method)
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(drafter.run())
    drafter.receive(stream, Decoded((to_open("a"), to_open("b"))))
    await until(lambda: method.proposed)
    drafter.receive(stream, Decoded((Close("a", 1),)))
    await until(method.closing.is_set)
    drafter.receive(stream, Decoded((Close("b", 1), to_open("c"), to_open("d"))))
    method.go_on.set()
    await until(lambda: loop.done() or {"c": 4, "d": 4} in method.proposed)
    assert not loop.done()
    loop.cancel()
    await drafter.close()


async def test_only_known_targets_are_dialled():
    dialled: list[str] = []
    known = {"t1"}
    drafter = OfflineDrafter(InterruptedMethod(), LIMITS, "v", "m", access=TargetAccess(known=lambda: frozenset(known)))
    drafter._dial = dialled.append  # type: ignore[method-assign]
    stream, outbox = drafter.router_up(Hello("router", "v", "m"))
    drafter.receive(stream, Decoded((to_open("a"), replace(to_open("b"), target_address="t2"))))
    assert dialled == ["t1"]
    _, refusal = await outbox.take()
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.reason) == ("b", RefusalReason.OVERLOADED)
    assert drafter.refusals.counts.total() == 1
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
    """Needs to know nothing of sessions."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1

    def open(self, request: Open) -> None: ...

    def committed(self, session: str, tokens: Sequence[int]) -> None: ...

    def close(self, sessions: Sequence[str]) -> None: ...


class EndlessMethod(Stateless):
    """Drafts ahead until it is interrupted."""

    def __init__(self) -> None:
        self.ahead = threading.Event()
        self.interrupted = threading.Event()
        self.stop = threading.Event()
        self.passes: list[tuple[str, ...]] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.passes.append(tuple(each.session for each in requests))
        return [Proposal(each.session, each.base_len, each.prefix_hash, DraftTree.chain((1,))) for each in requests]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        self.passes.append(tuple(each.session for each in requests))
        self.ahead.set()
        while not interrupted() and not self.stop.is_set():
            pass
        self.interrupted.set()
        return []


class OneToken(Stateless):
    """Drafts a token for whoever wants one, at once or by a forward."""

    def __init__(self, at_once: bool) -> None:
        self.made = 0
        self._at_once = at_once

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.made += 1
        block = DraftTree.chain((1,))
        return [Proposal(e.session, e.base_len, e.prefix_hash, block, is_at_once=self._at_once) for e in requests]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        raise AssertionError("nobody asked for drafts ahead")


@pytest.mark.parametrize("at_once", [False, True])
async def test_blocks_that_took_no_forward_say_nothing_of_what_drafting_costs(at_once):
    method = OneToken(at_once)
    profile = DraftCost(forward=ForwardCost.linear(0.01))
    drafter = OfflineDrafter(method, LIMITS, "v", "m", draft_ahead=False, figures=MethodFigures(cost=profile))
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(drafter.run())
    drafter.receive(stream, Decoded((to_open("a"),)))
    await until(lambda: method.made == 1)
    drafter.receive("t1", Decoded((Verdict("a", 1, 2, Prefix(KEY, (1, 2)).hash, (3,), 0, 0),)))
    await until(lambda: method.made == 2)
    drafter.receive(stream, Decoded((Close("a", 1), to_open("b"))))
    await until(lambda: method.made == 3)
    assert (drafter.timing.pace.count > 0) is not at_once
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await drafter.close()


class EarlyMethod(OneToken):
    """Sends a block while its passes ahead go on, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(at_once=False)
        self.stop = threading.Event()

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        (request,) = requests
        outcome = (1, 2)
        prefix = Prefix(KEY, (*to_open("a").tokens, *outcome))
        early([Proposal(request.session, prefix.length, prefix.hash, DraftTree.chain((3,)), outcome=outcome)])
        self.stop.wait(10)
        return []


async def test_a_block_is_sent_when_it_leaves_which_may_be_before_its_pass_ends():
    method = EarlyMethod()
    drafter = a_drafter(method, draft_ahead=True)
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(drafter.run())
    drafter.receive(stream, Decoded((to_open("a"),)))
    await until(lambda: drafter.scheduler.counts["blocks"] == 2)
    events = drafter.timeline.events()
    assert [event.name for event in events] == ["draft", "drafted", "sent", "draft ahead", "sent"]
    assert {event.sessions for event in events} == {("a",)}
    loop.cancel()
    method.stop.set()
    await drafter.close()


async def test_a_pass_that_brings_no_block_sends_none():
    drafter = a_drafter(OneToken(at_once=False))
    drafter._offer([Proposal("unknown", 2, 0, DraftTree.chain((1,)))])
    assert drafter.timeline.events() == []
    await drafter.close()


async def test_what_is_wanted_for_sure_interrupts_drafting_ahead_and_nothing_else_does():
    method = EndlessMethod()
    drafter = a_drafter(method, draft_ahead=True)
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(drafter.run())
    drafter.receive(stream, Decoded((to_open("a"),)))
    await until(method.ahead.is_set)
    drafter.receive(stream, Decoded((Close("unknown", 1),)))
    drafter.receive("t1", Decoded((Verdict("unknown", 1, 2, 0, (3,), 0, 0),)))
    assert not drafter._wanted.is_set()
    drafter.receive(stream, Decoded((to_open("b"),)))
    await until(method.interrupted.is_set)
    await until(lambda: ("b",) in method.passes)
    drafter.receive(stream, Decoded((Close("a", 1), Close("b", 1), to_open("c"))))
    await until(lambda: ("c",) in method.passes)
    loop.cancel()
    method.stop.set()
    await drafter.close()
