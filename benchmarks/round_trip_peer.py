"""Runs one process of `round_trip.py`: the target, the drafter, or the router that opens sessions on both.

    PYTHONPATH=CHECKOUT python benchmarks/round_trip_peer.py target CORE
    PYTHONPATH=CHECKOUT python benchmarks/round_trip_peer.py drafter CORE
    PYTHONPATH=CHECKOUT python benchmarks/round_trip_peer.py router

PYTHONPATH selects the measured checkout, which may lack this file. Target and drafter print their address, serve until
their standard input closes, and then print their events as JSON: `[name, seconds]`, on the machine's monotonic clock.
The router reads loads as JSON, one a line, and answers each with its start and end.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import uvloop

from actors.drafter import Drafter
from actors.net import streams
from actors.servers import serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.drafting.session_table import DrafterLimits
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits
from cluster.verification.step import Outcome, StateRead, StepPlan
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Close, DraftRequest, Hello, Identity, Open, Sampling, Shape, Verdict
from protos.speculation_pb2_grpc import DraftServiceStub, TargetServiceStub

VOCABULARY = 32
CONTEXT = 8192
SESSIONS = 256
PAGE_SIZE = 16
PROMPT = tuple(range(16))
PATIENCE_S = 60.0  # every step waits for its blocks
ACCEPTED = 2  # tokens of each block
NEXT_TOKEN = 7
ATTACH_S = 0.1  # head start of the drafter, so that the first step has blocks
IDENTITY = ("toy-vocabulary", "toy-target")
ROUTER_NICE = 10  # the router reads verdicts when target and drafter are idle


class Events:
    """Events of this process, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[str, float]] = []

    def record(self, name: str) -> None:
        self._events.append((name, time.perf_counter()))

    def watch_frames(self) -> None:
        """Records each frame after its encoding and before its decoding, by its type."""
        encoding = streams.encode
        decoding = streams.decode_after_greeting

        def watched_encoding(frame_type: Any, messages: Any) -> Any:
            frame = encoding(frame_type, messages)
            self.record(f"{frame_type.DESCRIPTOR.name} encoded")
            return frame

        def watched_decoding(frame: Any) -> Any:
            self.record(f"{frame.DESCRIPTOR.name} received")
            return decoding(frame)

        streams.encode = watched_encoding
        streams.decode_after_greeting = watched_decoding

    def printed(self) -> str:
        return json.dumps(self._events)


class InstantEngine:
    """Accepts two tokens of each block without computing."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def step(self, plan: StepPlan) -> list[Outcome]:
        drafted = sum([row.drafted > ACCEPTED for row in plan.rows])
        self._events.record(f"plan {len(plan.rows)} {drafted}")
        path = tuple(range(ACCEPTED))
        rows = [row for row in plan.rows if row.decide]
        outcomes = [Outcome(row.session, path if row.drafted > ACCEPTED else (), NEXT_TOKEN) for row in rows]
        self._events.record(f"outcome {len(outcomes)}")
        return outcomes

    async def read(self, read: StateRead) -> bytes:
        raise NotImplementedError

    async def prepare(self, grammar: str) -> str | None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class InstantDraft:
    """Drafts the same block for every session without computing; never drafts ahead."""

    shapes = frozenset((Shape.CHAIN,))
    tokens_per_forward = 1

    def __init__(self, events: Events) -> None:
        self._events = events

    def open(self, request: Open) -> None:
        pass

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        pass

    def close(self, sessions: Sequence[str]) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._events.record("draft")
        return [
            Proposal(
                asked.session, asked.base_len, asked.prefix_hash, DraftTree.chain((1, 2, 3, 4)[: asked.max_tokens])
            )
            for asked in requests
        ]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return []


async def serve_until_input_ends(role: str) -> None:
    events = Events()
    events.watch_frames()
    if role == "target":
        pages = SESSIONS * CONTEXT // PAGE_SIZE
        limits = VerificationLimits(VOCABULARY, CONTEXT, SESSIONS, 8 * SESSIONS, pages=pages, page_size=PAGE_SIZE)
        replica = TargetReplica(InstantEngine(events), limits, *IDENTITY, 30.0, LockStep(PATIENCE_S))
        server = await serve_target(replica, "127.0.0.1")
        running = asyncio.create_task(replica.run())
    else:
        drafter = Drafter(InstantDraft(events), DrafterLimits(VOCABULARY, CONTEXT, SESSIONS), {"": Identity(*IDENTITY)})
        server = await serve_drafter(drafter, "127.0.0.1")
        running = asyncio.create_task(drafter.run())
    print(server.address, flush=True)
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait((running, reading), return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    print(events.printed(), flush=True)
    os._exit(0)  # open streams would delay a regular exit


def opened(number: int, load: dict[str, Any]) -> Open:
    """Returns the Open of a session that ends after the load's number of rounds."""
    per_round = 1 + (ACCEPTED if load["draft_tokens"] else 0)
    return Open(
        session=f"{load['name']}-{number}",
        attempt=1,
        tokens=PROMPT,
        prompt_len=len(PROMPT),
        max_len=len(PROMPT) + load["steps"] * per_round,
        stop_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choice=0,
        hash_key=number + 1,
        acceptance=Acceptance.COUPLED,
        draft_tokens=load["draft_tokens"],
        target_address=load["target"],
    )


async def route(load: dict[str, Any]) -> None:
    """Opens the load's sessions and returns after all have ended."""
    opens = [opened(number, load) for number in range(load["sessions"])]
    hello = Hello(f"router-{load['name']}", *IDENTITY)
    async with (
        grpc.aio.insecure_channel(load["drafter"]) as to_drafter,
        grpc.aio.insecure_channel(load["target"]) as to_target,
    ):
        drafting = DraftServiceStub(to_drafter).Drive()
        verifying = TargetServiceStub(to_target).Drive()
        for stream, frame_type in ((drafting, pb.RouterToDrafter), (verifying, pb.RouterToTarget)):
            await stream.write(encode(frame_type, [hello]))
            await stream.read()
        if load["draft_tokens"]:
            await drafting.write(encode(pb.RouterToDrafter, opens))
            await asyncio.sleep(ATTACH_S)
        await verifying.write(encode(pb.RouterToTarget, opens))
        left = len(opens)
        while left:
            frame = await verifying.read()
            assert not frame.refusals, frame.refusals[0].message
            left -= sum([isinstance(each, Verdict) and each.finish != 0 for each in decode(frame).messages])
        await drafting.write(encode(pb.RouterToDrafter, [Close(each.session, each.attempt) for each in opens]))
        await asyncio.sleep(0.1)


def main(role: str, core: str = "") -> None:
    if role == "router":
        os.nice(ROUTER_NICE)
        for line in sys.stdin:
            began_s = time.perf_counter()
            asyncio.run(route(json.loads(line)))
            print(json.dumps((began_s, time.perf_counter())), flush=True)
    else:
        os.sched_setaffinity(0, {int(core)})
        uvloop.install()  # as Ray does in its workers
        asyncio.run(serve_until_input_ends(role))


if __name__ == "__main__":
    main(*sys.argv[1:])
