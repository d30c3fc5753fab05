"""Incompatible and hostile peers over real gRPC are refused without affecting others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from actors.net import streams
from actors.target import TargetReplica
from cluster.envelope import Send
from cluster.routing.ledger import CommittedTokens
from cluster.trust import issue
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import (
    PROOF_BYTES,
    PROTOCOL_VERSION,
    Acceptance,
    AssignmentToken,
    Attach,
    Block,
    Close,
    Hello,
    LiveSession,
    Message,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    StateDtype,
    States,
    StatesAck,
    Verdict,
    Welcome,
)
from tests.integration.harness import (
    CHECKED,
    CONTEXT,
    IDENTITY,
    VOCABULARY,
    Cluster,
    PacedEngine,
    cluster,
    eventually,
    plain_greedy,
)
from tests.integration.stream_methods import (
    DRIVE_DRAFTER,
    DRIVE_TARGET,
    STATES,
    STREAM_METHODS,
    VERIFY,
    StreamMethod,
    refused_with,
    reveals_only,
    stream_to,
    within,
)
from tests.session_events import events_of

HELLO = Hello("stranger", IDENTITY.vocabulary, IDENTITY.target_model)
OPEN = Open("theirs", 1, (1, 2), 2, 20, (), Sampling(), 0, 0, 0, Acceptance.REJECTION, 4, "127.0.0.1:9")


@asynccontextmanager
async def busy_cluster(**options: Any) -> AsyncIterator[Cluster]:
    """Yields a cluster with a running session, and asserts that the session is not disturbed."""
    async with cluster(**options) as c:
        running = asyncio.create_task(c.tokens(c.generation(max_len=303)))
        (target,) = c.targets.values()
        await eventually(lambda: any(e.name == "decided" for e in target.timeline.events()), "a session is under way")
        yield c
        assert not running.done(), "the session ended before the harm was done: this showed nothing"
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), 300)
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40), "and the next one is served as well"


@asynccontextmanager
async def greeted(c: Cluster, method: StreamMethod) -> AsyncIterator[Any]:
    """Yields a stream after its Hello and Welcome."""
    async with stream_to(c, method) as stream:
        await stream.write(encode(method.frame, [HELLO]))
        assert isinstance(decode(await stream.read()).messages[0], Welcome)
        yield stream


# ---------------------------------------------------------------- greetings

GREETINGS = {
    "an older protocol version": (
        [replace(HELLO, protocol_version=PROTOCOL_VERSION - 1)],
        f"the peer has {PROTOCOL_VERSION - 1}, this side has {PROTOCOL_VERSION}; run the same release",
    ),
    "a newer protocol version": ([replace(HELLO, protocol_version=PROTOCOL_VERSION + 1)], "protocol version differs"),
    "another vocabulary": ([replace(HELLO, vocabulary="other")], "vocabulary differs: the caller has other"),
    "another target model": ([replace(HELLO, target_model="other")], "target model differs"),
    "no hello": ([], "must hold a Hello"),
    "a hello without a name": ([replace(HELLO, peer_id="")], "must hold a Hello"),
}


@STREAM_METHODS
async def test_incompatible_peers_are_refused_with_the_reason(method):
    async with busy_cluster() as c:
        for messages, why in GREETINGS.values():
            async with stream_to(c, method) as stream:
                await stream.write(encode(method.frame, messages))
                with refused_with(grpc.StatusCode.FAILED_PRECONDITION, why):
                    await within(5, stream.read())


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        (DRIVE_TARGET, [OPEN]),
        (VERIFY, [Attach("s", 1, 1)]),
        (STATES, [StatesAck("s", 1)]),
        (DRIVE_DRAFTER, [OPEN]),
    ],
    ids=["target", "verify", "states", "drafter"],
)
async def test_messages_before_a_hello_are_refused(method, messages):
    async with busy_cluster() as c, stream_to(c, method) as stream:
        await stream.write(encode(method.frame, messages))
        with refused_with(grpc.StatusCode.FAILED_PRECONDITION, "must hold a Hello"):
            await within(5, stream.read())


@STREAM_METHODS
async def test_invalid_protobuf_ends_only_its_stream(method):
    """Sends invalid bytes as the first frame, and after a valid greeting."""
    hello = encode(method.frame, [HELLO]).SerializeToString()
    async with busy_cluster() as c, grpc.aio.insecure_channel(method.address(c)) as channel:
        for greeting in ([], [hello]):
            call = channel.stream_stream(method.path)()
            for frame in greeting:
                await call.write(frame)
                assert await within(5, call.read()), "a Welcome"
            await call.write(b"\xff\xff\xff\xff")
            with refused_with(grpc.StatusCode.INVALID_ARGUMENT, "not a frame"):
                await within(5, call.read())


@STREAM_METHODS
async def test_an_oversized_frame_ends_only_its_stream(method):
    async with busy_cluster() as c, greeted(c, method) as stream:
        large = pb.Hello(peer_id="x" * (17 << 20))
        with refused_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            await stream.write(method.frame(hello=large))
            await within(10, stream.read())


# ---------------------------------------------------------------- messages from strangers


def proto_open(**changes: Any) -> pb.Open:
    message = encode(pb.RouterToTarget, [OPEN]).opens[0]
    for name, value in changes.items():
        setattr(message, name, value)
    return message


BAD_OPENS = {
    "ids out of range": (proto_open(tokens=VOCABULARY.to_bytes(4, "little") * 2), "outside the vocabulary"),
    "negative ids": (proto_open(tokens=b"\xff" * 8), "negative"),
    "negative ids of the draft": (proto_open(draft_prompt=b"\xff" * 8), "draft_prompt contains a negative"),
    "lengths that do not fit": (proto_open(prompt_len=9), "prompt_len is 9"),
    "beyond the context": (proto_open(max_len=CONTEXT + 1), "context"),
    "huge K": (proto_open(draft_tokens=1 << 31), "draft_tokens"),
    "no acceptance": (proto_open(acceptance=0), "Acceptance"),
}


@pytest.mark.parametrize("method", [DRIVE_TARGET, DRIVE_DRAFTER], ids=["target", "drafter"])
async def test_invalid_opens_are_refused_with_session_and_attempt(method):
    async with busy_cluster() as c, greeted(c, method) as stream:
        for message, why in BAD_OPENS.values():
            await stream.write(method.frame(opens=[message]))
            (refusal,) = decode(await within(5, stream.read())).messages
            assert isinstance(refusal, Refusal)
            assert (refusal.session, refusal.attempt, refusal.reason) == ("theirs", 1, RefusalReason.INVALID)
            assert why in refusal.message


async def open_verify_stream(target: TargetReplica, stream: Any, session: str) -> None:
    """Makes the target accept this drafter's blocks, as if the session's router had assigned it."""
    key = target.scheduler.admission.running[session].open.token_key
    attach = Attach(session, 1, 1, None, issue(key, session, 99))
    await stream.write(encode(pb.DrafterToTarget, [attach]))
    assert isinstance(decode(await within(5, stream.read())).messages[0], Resync)


async def test_invalid_and_stale_blocks_are_counted_and_dropped():
    impossible = SparseProbs(((1,),), ((0,),))
    malformed = [
        Block("theirs", 2, 1, DraftTree.chain((1,) * 128_000)),
        Block("theirs", 2, 1, DraftTree.chain((1,), impossible)),
    ]
    outside = SparseProbs(((1, VOCABULARY),), ((1, 1),))
    async with busy_cluster() as c, greeted(c, VERIFY) as stream:
        (target,) = c.targets.values()
        (running,) = target.scheduler.admission.running
        await open_verify_stream(target, stream, running)
        before = target.scheduler.counts.dropped.copy()
        blocks = [
            *malformed,
            Block("unknown", 2, 1, DraftTree.chain((1,))),
            Block(running, 2**32 - 1, 1, DraftTree.chain((1,))),
            Block(running, 3, 1, DraftTree.chain((VOCABULARY,))),
            Block(running, 3, 1, DraftTree.chain((1,), outside)),
            Block(running, 200, 1, DraftTree.chain((1,) * 128)),
            Block(running, 1, 1, DraftTree.chain((1,))),
        ]
        await stream.write(encode(pb.DrafterToTarget, blocks))
        causes = {"beyond_context", "out_of_vocabulary", "too_long", "stale"}
        await eventually(lambda: causes <= (target.scheduler.counts.dropped - before).keys(), "bad blocks are counted")
        assert target.refused == {"Block": 2}


async def test_a_session_leaves_a_target_with_malformed_verdicts(monkeypatch, caplog):
    """The router must also close the session at that target; the cluster asserts that nothing remains."""
    async with cluster(targets=2) as c:
        tokens: list[int] = []
        garbled: TargetReplica | None = None
        async for event in events_of(c.router, c.generation(max_len=103)):
            tokens += event.tokens if isinstance(event, CommittedTokens) else ()
            if len(tokens) >= 20 and garbled is None:
                garbled = next(target for target in c.targets.values() if not target.is_idle)
                alter(garbled, without_tokens, monkeypatch)
        assert tokens == plain_greedy((1, 2, 3), 100)
    assert "malformed Verdict" in caplog.text


def alter(target: TargetReplica, altered: Callable[[Message], list[Message]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces each message of this target after a step or a read of hidden states."""
    for scheduler, name in ((target.scheduler, "settle"), (target.scheduler.feeds, "sent")):
        act = getattr(scheduler, name)

        def sends(*arguments: Any, act: Callable[..., list[Send]] = act) -> list[Send]:
            return [(to, message) for to, sent in act(*arguments) for message in altered(sent)]

        monkeypatch.setattr(scheduler, name, sends)


def without_tokens(message: Message) -> list[Message]:
    """Removes the tokens of a verdict, which makes it invalid."""
    return [replace(message, tokens=()) if isinstance(message, Verdict) else message]


async def test_wrong_hidden_states_cost_blocks_but_no_token(monkeypatch):
    """The session's target sends states of another text or layout, with missing rows, or with invalid bytes.

    These drafters' method fails on any row that does not match its text.
    """
    async with cluster(reading=CHECKED) as c:
        (target,) = c.targets.values()
        (drafter,) = c.drafters.values()
        corruptions = [
            {"prefix_hash": 1},
            {"dtype": StateDtype.FLOAT8, "width": 4},
            {"first": 200},
            {"rows": bytes(5)},
            {"width": 0},
        ]
        sent_count = 0

        def with_corruption(message: Message) -> list[Message]:
            nonlocal sent_count
            if not isinstance(message, States):
                return [message]
            corrupted = replace(message, **corruptions[sent_count % len(corruptions)])
            sent_count += 1
            return [corrupted, message] if sent_count % 3 else [corrupted]

        alter(target, with_corruption, monkeypatch)
        assert await c.tokens(c.generation(max_len=103)) == plain_greedy((1, 2, 3), 100)
        counts = drafter.scheduler.counts
        assert sent_count > len(corruptions)
        assert counts["states_mismatch"] > 0
        assert counts["states_unfit"] > 0
        assert drafter.refused["States"] > 0
        assert counts["states"] > 50, "it asked again for what was missing"


async def test_a_stranger_receives_no_hidden_states():
    async with busy_cluster() as c, greeted(c, VERIFY) as verify, greeted(c, STATES) as states:
        (target,) = c.targets.values()
        (running,) = target.scheduler.admission.running
        await states.write(encode(pb.DrafterToTargetStates, [StatesAck(running, 2**32 - 1), StatesAck("unknown", 1)]))
        await verify.write(encode(pb.DrafterToTarget, [Attach(running, 40, 1, 40), Attach("unknown", 4, 1, 0)]))
        bad = pb.Attach(session=running, have_len=3, states_from=4)
        await verify.write(pb.DrafterToTarget(attaches=[bad]))
        await eventually(lambda: target.refused["Attach"] == 1, "the claim is refused")
        assert target.scheduler.feeds.rows.total() == 0


async def test_a_stranger_cannot_end_or_starve_a_session():
    """A stranger tries to close the session, to claim it in a new Hello, and to fill its buffer with useless blocks."""
    async with busy_cluster() as c, greeted(c, VERIFY) as verify, greeted(c, DRIVE_TARGET) as drive:
        (target,) = c.targets.values()
        (running,) = target.scheduler.admission.running
        await drive.write(encode(pb.RouterToTarget, [Close(running, 9), Close("unknown", 1)]))
        async with stream_to(c, DRIVE_TARGET) as again:
            live = (LiveSession(running, 9),)
            await again.write(encode(pb.RouterToTarget, [replace(HELLO, live=live)]))
            await again.read()
        await open_verify_stream(target, verify, running)
        flood = [Block(running, 60 + i % 30, i, DraftTree.chain((1,))) for i in range(200)]
        await verify.write(encode(pb.DrafterToTarget, flood))
        await eventually(lambda: target.scheduler.counts.dropped["buffer_full"] > 0, "the buffer is bounded")


async def test_a_stranger_cannot_reopen_a_session():
    """The target and the drafter both refuse, and reveal nothing else."""
    async with busy_cluster() as c:
        (target,) = c.targets.values()
        (drafter,) = c.drafters.values()
        (running,) = target.scheduler.admission.running
        await eventually(lambda: running in drafter.scheduler.sessions.all, "it is drafted for")
        for method, served in ((DRIVE_TARGET, target), (DRIVE_DRAFTER, drafter)):
            async with greeted(c, method) as stream:
                await stream.write(encode(method.frame, [replace(OPEN, session=running, attempt=9)]))
                (refusal,) = decode(await within(5, stream.read())).messages
                assert refusal == Refusal(running, 9, RefusalReason.INVALID, "not permitted")
            assert served.scheduler.refusals.counts["an Open of another router's session"] == 1


async def test_a_stranger_cannot_take_a_session_whose_grammar_compiles(monkeypatch):
    """A stranger tries to open the session, to close it, and to claim it in a new Hello."""
    compiled = asyncio.Event()

    async def prepare(engine: PacedEngine, grammar: str) -> str | None:
        await compiled.wait()
        return None

    monkeypatch.setattr(PacedEngine, "prepare", prepare)
    async with busy_cluster() as c, greeted(c, DRIVE_TARGET) as drive:
        (target,) = c.targets.values()
        asked = asyncio.create_task(c.tokens(c.generation(session="held", grammar="any text")))
        await eventually(lambda: not target._gate.is_empty, "it is held")
        for attempt in (0, 1, 9):
            theirs = replace(OPEN, session="held", attempt=attempt, grammar="their own")
            await drive.write(encode(pb.RouterToTarget, [theirs, Close("held", attempt)]))
            (refusal,) = decode(await within(5, drive.read())).messages
            assert refusal == Refusal("held", attempt, RefusalReason.INVALID, "not permitted")
        async with stream_to(c, DRIVE_TARGET) as again:
            await again.write(encode(pb.RouterToTarget, [replace(HELLO, live=(LiveSession("held", 1),))]))
            await within(5, again.read())
        compiled.set()
        assert await asked == plain_greedy((1, 2, 3), 40)
        assert target.scheduler.refusals.counts["an Open of another router's session"] == 3


async def test_a_drafter_dials_only_known_targets(caplog):
    """This prevents an impostor router from redirecting the shared token."""
    dialled = asyncio.Event()

    def arrived(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        writer.close()

    listener = await asyncio.start_server(arrived, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    async with listener, busy_cluster(dials_any=False) as c, greeted(c, DRIVE_DRAFTER) as stream:
        (drafter,) = c.drafters.values()
        for attempt in (1, 2):
            message = replace(OPEN, attempt=attempt, target_address=f"{host}:{port}")
            await stream.write(encode(pb.RouterToDrafter, [message]))
            (refusal,) = decode(await within(5, stream.read())).messages
            assert isinstance(refusal, Refusal)
            assert (refusal.session, refusal.attempt, refusal.reason) == ("theirs", attempt, RefusalReason.OVERLOADED)
        with pytest.raises(TimeoutError):
            await within(0.2, dialled.wait())
        assert drafter.scheduler.refusals.counts["an Open with an unknown target"] == 2
        assert len([record for record in caplog.records if "unknown target" in record.getMessage()]) == 1


async def test_a_drafter_with_a_routers_name_takes_no_session():
    """Drafters know router names, but sessions belong to router streams."""
    async with busy_cluster() as c, stream_to(c, VERIFY) as verify:
        (target,) = c.targets.values()
        (running,) = target.scheduler.admission.running
        owner = target.scheduler.admission.running[running].router
        await verify.write(encode(pb.DrafterToTarget, [replace(HELLO, peer_id=c.router.peer_id)]))
        assert isinstance(decode(await within(5, verify.read())).messages[0], Welcome)
        assert target.scheduler.admission.running[running].router == owner


@STREAM_METHODS
async def test_a_second_hello_ends_only_its_stream(method):
    async with busy_cluster() as c, greeted(c, method) as stream:
        await stream.write(encode(method.frame, [HELLO]))
        with reveals_only(grpc.StatusCode.INVALID_ARGUMENT):
            await within(5, stream.read())


async def test_a_stranger_without_assignment_token_is_ignored():
    """The stranger knows the prompt and its hash, but has no assignment token from the session's router."""
    async with busy_cluster() as c, greeted(c, VERIFY) as verify:
        (target,) = c.targets.values()
        (running,) = target.scheduler.admission.running
        session = target.scheduler.admission.running[running]
        right = session.prefix.hash_at(3)
        assert right is not None
        for assignment_token in (None, issue(b"guess", running, 99), AssignmentToken(2**32 - 1, bytes(PROOF_BYTES))):
            await verify.write(encode(pb.DrafterToTarget, [Attach(running, 3, right, None, assignment_token)]))
        await verify.write(encode(pb.DrafterToTarget, [Block(running, 3, right, DraftTree.chain((1,)))] * 200))
        await eventually(lambda: target.scheduler.counts.dropped["not_assigned"] == 200, "its blocks are dropped")
        with pytest.raises(TimeoutError):
            await within(0.2, verify.read())
        assert target.scheduler.refusals.counts["an Attach to a session that it was not assigned"] == 3


async def test_early_blocks_do_not_evict_another_drafters(caplog):
    """A stranger guesses names of future sessions; the target limits its early blocks and logs them once."""
    async with cluster(lock_step=True) as c, greeted(c, VERIFY) as verify:
        (target,) = c.targets.values()
        names = [f"session-{number}" for number in range(10)]
        for name in names:
            mail = [Attach(name, 3, 1), *(Block(name, 3, at, DraftTree.chain((1,))) for at in range(100))]
            await verify.write(encode(pb.DrafterToTarget, mail))
        await eventually(lambda: target.scheduler.counts.dropped["buffer_full"] == 10 * 36, "64 a session wait")
        assert await c.tokens(c.generation(session=names[0])) == plain_greedy((1, 2, 3), 40)
        assert c.accepted > 0, "its own drafter was heard"
        assert target.scheduler.counts.dropped["not_assigned"] == 64
        assert len([record for record in caplog.records if "not assigned" in record.getMessage()]) == 2


async def test_a_drafter_that_sends_unrequested_blocks_is_paused(monkeypatch):
    monkeypatch.setattr(streams, "REST_FACTOR", 1e9)
    early = [Block("to-come", 3, at, DraftTree.chain((1,))) for at in range(10)]
    async with busy_cluster() as c, greeted(c, VERIFY) as verify, greeted(c, VERIFY) as another:
        (target,) = c.targets.values()
        for _ in range(3):
            await verify.write(encode(pb.DrafterToTarget, early))
        await eventually(lambda: target.scheduler.counts.unrequested > 0, "the first frame is heard")
        await another.write(encode(pb.DrafterToTarget, early))
        await eventually(lambda: target.scheduler.counts.unrequested == 20, "others are heard")
        await asyncio.sleep(0.2)
        assert target.scheduler.counts.unrequested == 20


async def test_a_frame_with_too_many_messages_ends_only_its_stream():
    block = Block("to-come", 3, 1, DraftTree.chain((1,)))
    async with busy_cluster() as c, greeted(c, VERIFY) as verify:
        await verify.write(encode(pb.DrafterToTarget, [block] * 1000))
        (target,) = c.targets.values()
        await eventually(lambda: target.scheduler.counts.unrequested == 1000, "a frame below the limit is processed")
    async with busy_cluster() as c, greeted(c, VERIFY) as verify:
        with refused_with(grpc.StatusCode.INVALID_ARGUMENT, ""):
            await verify.write(encode(pb.DrafterToTarget, [block] * 10_000))
            await within(5, verify.read())


async def test_extreme_sampling_values_are_served():
    """The values are valid but numerically extreme: nearly greedy, nearly nothing allowed, everything penalized."""
    extremes = [
        Sampling(temperature=1e-39),
        Sampling(temperature=3e38),
        Sampling(top_p=1e-40),
        Sampling(min_p=1.0, top_k=2**32 - 1),
        Sampling(temperature=1e-3, frequency_penalty=-2.0, presence_penalty=2.0),
    ]
    async with cluster() as c:
        for rule in Acceptance:
            asked = [c.generation(sampling=sampling, acceptance=rule, max_len=20) for sampling in extremes]
            texts = await within(60, asyncio.gather(*(c.tokens(generation) for generation in asked)))
            assert [len(text) for text in texts] == [17] * len(extremes)
            assert texts[0] == plain_greedy((1, 2, 3), 17)
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40)
