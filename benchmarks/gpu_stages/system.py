"""Stage F: a random pair on one device, over gRPC: without speculation, with the draft, and with a useless draft.

The arms alternate. Each has a target replica of its own, since a replica's controller learns from its blocks. The time
of an arm runs from opening its sessions to the last verdict, prompts included.
"""

import asyncio
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any

import grpc

from cluster.telemetry import Actor, Span, spans
from gpu_stages.results import OUT_OF_TIME, Emit, Result, Setting, Unmeasured
from gpu_stages.system_peer import ARMS, IDENTITY, PairSizes, TraceRequest, run_drafter, run_target
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.messages import Acceptance, Close, Finish, Hello, Open, Sampling, Verdict
from protos.speculation_pb2_grpc import DraftServiceStub, TargetServiceStub

PLAIN, SPECULATIVE, USELESS = ARMS
FULL = PairSizes("8b", 128_256, 0.75, prompt=64, tokens=192, sessions=(1, 8, 32), draft_tokens=5, rounds=4)
TINY = PairSizes("tiny", 500, 0.75, prompt=16, tokens=12, sessions=(1, 2), draft_tokens=3, rounds=2, is_lock_step=True)
SECONDS_PER_ROUND = 25.0
SHOWN_ROUNDS = 3  # of the timeline
STOP_S = 10.0
WARM_UP = -1  # number of the round that does not count


@dataclass(frozen=True)
class Pair(Result):
    """The pair and its engines."""

    agreement: float
    target_s: float  # until the target serves
    drafters_s: float
    target_attention: str
    target_mode: str
    drafter_attention: str
    drafter_mode: str


@dataclass(frozen=True)
class Answers(Result):
    """One run of an arm."""

    arm: str
    sessions: int
    round: int
    seconds: float
    tokens: int
    verifications: int
    accepted: int


@dataclass(frozen=True)
class Speed(Result):
    """Runs of one arm; ratios are relative to the run without speculation in the same round."""

    arm: str
    sessions: int
    rounds: int
    tokens_per_s: float  # median
    ratio: float  # median
    least_ratio: float
    largest_ratio: float
    tokens_per_verification: float


@dataclass(frozen=True)
class StageTime(Result):
    """Durations of one stage of a round, from the recordings of target and drafter."""

    arm: str
    sessions: int
    stage: str
    count: int
    p50_ms: float
    largest_ms: float


@dataclass(frozen=True)
class RoundSpan(Result):
    """A span of the timeline of the last rounds of a run, relative to its first span."""

    arm: str
    sessions: int
    actor: str
    stage: str
    begins_ms: float
    ends_ms: float
    members: int  # sessions in the span


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_tiny else FULL
    with peers(sizes, setting) as started:
        emit(started.facts)
        asyncio.run(measure(sizes, started, setting, emit))


def summary(results: Sequence[Result]) -> str:
    speeds = [one for one in results if isinstance(one, Speed) and one.arm != PLAIN]
    return "; ".join(f"{one.arm} {one.ratio:.2f}x at {one.sessions}" for one in speeds)


# ---------------------------------------------------------------- processes


class Peer:
    """A process of the pair; `call` asks it a question."""

    def __init__(self, run: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=run, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a process of the pair failed; see its output above") from None

    def trace(self, name: str, since_s: float) -> Actor:
        """Returns the events of a replica or drafter since a wall-clock time."""
        self._connection.send(TraceRequest(name, since_s))
        actor: Actor = self.receive()
        return actor

    def stop(self) -> None:
        with suppress(BrokenPipeError):  # it failed
            self._connection.send(None)
        self._process.join(STOP_S)


@dataclass(frozen=True)
class Peers:
    """All processes, with their addresses by arm."""

    facts: Pair
    target: Peer
    drafters: dict[str, Peer]
    target_addresses: dict[str, str]
    drafter_addresses: dict[str, str]


@contextmanager
def peers(sizes: PairSizes, setting: Setting) -> Iterator[Peers]:
    """Starts the target and both drafters. They load one after the other, which limits peaks of memory."""
    began = time.monotonic()
    with _stopped(Peer(run_target, sizes, setting.device.type)) as target:
        agreement, target_facts, target_addresses = target.receive()
        target_s = time.monotonic() - began
        began = time.monotonic()
        with ExitStack() as stack:
            drafters = {}
            started = {}
            for arm in (SPECULATIVE, USELESS):
                drafters[arm] = stack.enter_context(_stopped(Peer(run_drafter, sizes, setting.device.type, arm)))
                started[arm] = drafters[arm].receive()
            drafter_facts, _ = started[SPECULATIVE]
            drafters_s = time.monotonic() - began
            facts = Pair(agreement, target_s, drafters_s, *astuple(target_facts), *astuple(drafter_facts))
            addresses = {arm: address for arm, (_, address) in started.items()}
            yield Peers(facts, target, drafters, target_addresses, addresses)


@contextmanager
def _stopped(peer: Peer) -> Iterator[Peer]:
    try:
        yield peer
    finally:
        peer.stop()


# ---------------------------------------------------------------- sessions


class Streams:
    """A router's streams to the target and the drafter of one arm."""

    def __init__(self, arm: str, sizes: PairSizes, target: str, drafter: str | None) -> None:
        self._arm = arm
        self._sizes = sizes
        self._target = target
        self._drafter = drafter
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Streams":
        self._verifying = await self._open(TargetServiceStub, self._target, pb.RouterToTarget)
        self._drafting = None
        if self._drafter is not None:
            self._drafting = await self._open(DraftServiceStub, self._drafter, pb.RouterToDrafter)
            reading = asyncio.create_task(_read_all(self._drafting))
            self._stack.callback(reading.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self, stub: Any, address: str, frame_type: Any) -> Any:
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(address))
        stream = stub(channel).Drive()
        await stream.write(encode(frame_type, [Hello(f"router-{self._arm}", *IDENTITY)]))
        await stream.read()
        return stream

    async def answer(self, count: int, number: int) -> Answers:
        """Answers `count` sessions at once."""
        opens = [self._request(number, count, index) for index in range(count)]
        began = time.perf_counter()
        if self._drafting is not None:
            await self._drafting.write(encode(pb.RouterToDrafter, opens))
        await self._verifying.write(encode(pb.RouterToTarget, opens))
        tokens = verifications = accepted = finished = 0
        while finished < count:
            frame = await self._verifying.read()
            assert not frame.refusals, frame.refusals[0].message
            for message in decode(frame).messages:
                if isinstance(message, Verdict):
                    tokens += len(message.tokens)
                    verifications += 1
                    accepted += message.accepted
                    finished += message.finish is not Finish.NONE
        seconds = time.perf_counter() - began
        if self._drafting is not None:
            closes = [Close(opened.session, opened.attempt) for opened in opens]
            await self._drafting.write(encode(pb.RouterToDrafter, closes))
        return Answers(self._arm, count, number, seconds, tokens, verifications, accepted)

    def _request(self, number: int, count: int, index: int) -> Open:
        """Returns a greedy session with the same prompt in all arms of a round."""
        sizes = self._sizes
        drawn = random.Random(f"{number} {count} {index}")
        prompt = tuple(drawn.randrange(sizes.vocabulary) for _ in range(sizes.prompt))
        return Open(
            session=f"{self._arm} {number} {count} {index}",
            attempt=1,
            tokens=prompt,
            prompt_len=sizes.prompt,
            max_len=sizes.prompt + sizes.tokens,
            stop_ids=(),
            sampling=Sampling(temperature=0.0),
            seed=1,
            choice=0,
            hash_key=1 + index,
            acceptance=Acceptance.COUPLED,
            draft_tokens=0 if self._drafting is None else sizes.draft_tokens,
            target_address=self._target,
        )


async def _read_all(stream: Any) -> None:
    """Reads a drafter's messages, which would otherwise fill the stream."""
    while True:
        if await stream.read() is grpc.aio.EOF:
            return


async def measure(sizes: PairSizes, started: Peers, setting: Setting, emit: Emit) -> None:
    """Runs the arms in alternation; every round starts with another arm."""
    runs: defaultdict[tuple[str, int], list[Answers]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        streams = {}
        for arm in ARMS:
            addresses = started.target_addresses[arm], started.drafter_addresses.get(arm)
            streams[arm] = await stack.enter_async_context(Streams(arm, sizes, *addresses))
            await streams[arm].answer(max(sizes.sessions), WARM_UP)
        for number in range(sizes.rounds):
            if not setting.has_time(0 if setting.is_tiny else SECONDS_PER_ROUND):
                emit(Unmeasured(f"round {number} and all after it", OUT_OF_TIME))
                break
            first = number % len(ARMS)
            for count in sizes.sessions:
                for arm in ARMS[first:] + ARMS[:first]:
                    began_s = time.time()
                    answers = await streams[arm].answer(count, number)
                    emit(answers)
                    runs[arm, count].append(answers)
                    if number == 0 and arm != PLAIN:
                        await asyncio.to_thread(record, started, arm, count, began_s, emit)
    for count in sizes.sessions:
        for arm in ARMS:
            if runs[arm, count]:
                emit(speed(runs[arm, count], runs[PLAIN, count]))


def speed(runs: Sequence[Answers], plain: Sequence[Answers]) -> Speed:
    ratios = [base.seconds / one.seconds for one, base in zip(runs, plain, strict=True)]
    return Speed(
        runs[0].arm,
        runs[0].sessions,
        len(runs),
        statistics.median(one.tokens / one.seconds for one in runs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        sum(one.tokens for one in runs) / sum(one.verifications for one in runs),
    )


# ---------------------------------------------------------------- timeline


def record(started: Peers, arm: str, count: int, began_s: float, emit: Emit) -> None:
    """Emits the stages of a run's rounds, and the timeline of its last rounds."""
    actors = [started.target.trace(arm, began_s), started.drafters[arm].trace(arm, began_s)]
    found = spans(actors)
    by_stage: defaultdict[str, list[float]] = defaultdict(list)
    for span in found:
        by_stage[span.name].append(1e3 * (span.ended_s - span.began_s))
    for stage, durations in by_stage.items():
        emit(StageTime(arm, count, stage, len(durations), statistics.median(durations), max(durations)))
    for shown in last_rounds(found):
        begins_ms, ends_ms = (1e3 * (at - found[0].began_s) for at in (shown.began_s, shown.ended_s))
        emit(RoundSpan(arm, count, shown.role, shown.name, begins_ms, ends_ms, len(shown.sessions)))


def last_rounds(found: Sequence[Span]) -> list[Span]:
    """Returns the spans from the third-last verification on."""
    steps = [span for span in found if span.name == "verify"]
    since_s = steps[-SHOWN_ROUNDS:][0].began_s if steps else 0.0
    return [span for span in found if span.began_s >= since_s]
