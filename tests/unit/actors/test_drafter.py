"""The drafter's loop, without its streams."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch

from actors.draft import Drafter
from actors.methods.draft_model import DraftModel
from actors.toy import ToyRunner
from cluster.drafting import DrafterLimits, Proposal, Want
from protos import speculation_pb2 as pb
from protos.codec import Decoded, decode
from protos.messages import Close, Hello, Open, Refusal, RefusalReason, Welcome
from tests.unit.cluster.samples import an_open

VOCABULARY, SESSIONS = 8, 2


class InterruptedMethod(DraftModel):
    """Lets the test say something to the drafter while slots are being given back."""

    def __init__(self) -> None:
        runner = ToyRunner(torch.eye(VOCABULARY), SESSIONS)
        super().__init__(runner, torch.ones(VOCABULARY, dtype=torch.bool), 2, 0.0)
        self.closing, self.go_on = threading.Event(), threading.Event()
        self.proposed: list[set[str]] = []

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        self.proposed.append({want.open.session for want in wants})
        return super().propose(wants)

    def close(self, sessions: Sequence[str]) -> None:
        self.closing.set()
        assert self.go_on.wait(10)
        super().close(sessions)


class OfflineDrafter(Drafter):
    """Dials nobody."""

    def _dial(self, address: str) -> None:
        pass


def a_drafter(method: Any) -> OfflineDrafter:
    return OfflineDrafter(method, DrafterLimits(VOCABULARY, 100, SESSIONS), "v", "m", draft_ahead=False)


def to_open(session: str) -> Open:
    return an_open(session, tokens=(1, 2), target_address="t1")


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_sessions_that_change_while_slots_come_back_find_one():
    """A full drafter whose sessions are all replaced at once once had two wants and one slot, and ended."""
    method = InterruptedMethod()
    drafter = a_drafter(method)
    stream, _ = drafter.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(drafter.run())
    drafter.router_frame(stream, Decoded((to_open("a"), to_open("b"))))
    await until(lambda: method.proposed)
    drafter.router_frame(stream, Decoded((Close("a", 1),)))
    await until(method.closing.is_set)
    drafter.router_frame(stream, Decoded((Close("b", 1), to_open("c"), to_open("d"))))
    method.go_on.set()
    await until(lambda: loop.done() or {"c", "d"} in method.proposed)
    assert not loop.done()
    loop.cancel()
    await drafter.close()


async def test_a_malformed_open_is_counted_and_refused_under_its_attempt():
    drafter = a_drafter(InterruptedMethod())
    stream, outbox = drafter.router_up(Hello("router", "v", "m"))
    drafter.router_frame(stream, decode(pb.RouterToDrafter(opens=[pb.Open(session="s", attempt=5)])))
    welcome, refusal = await outbox.take()
    assert isinstance(welcome, Welcome)
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.attempt, refusal.reason) == ("s", 5, RefusalReason.INVALID)
    assert drafter.refused == {"Open": 1}
    await drafter.close()
