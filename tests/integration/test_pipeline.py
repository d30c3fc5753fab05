"""The whole pipeline in one process over real gRPC: routes of blocks, overlap, and recovery from faults."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from actors.drafter import Drafter
from actors.engine.executor import Engine
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.errors import DrainingError, TargetLostError
from cluster.routing.ledger import CommittedTokens, Generation
from cluster.verification.step import Outcome, StepPlan
from protos.codec import Decoded
from protos.messages import Acceptance, Block, DraftRequest, Sampling, Verdict
from tests.integration.harness import LOGITS, VOCABULARY, Cluster, WrappedEngine, cluster, eventually, plain_greedy

SURE = 8 * LOGITS  # of a drafter that is right, and so sure of it that no token beside the first is likely
UNSURE = LOGITS + 0.3 * LOGITS.flip(0)  # of one that is right as a rule


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_many_concurrent_sessions_commit_the_greedy_text(acceptance):
    async with cluster() as c:
        prompts = [(1 + i, 2) for i in range(24)]  # more than the target's cache holds at once
        asked = [c.generation(prompt=p, max_len=len(p) + 40, acceptance=acceptance) for p in prompts]
        texts = await asyncio.gather(*(c.tokens(generation) for generation in asked))
        assert texts == [plain_greedy(prompt, 40) for prompt in prompts]


async def test_blocks_take_the_drafters_own_stream():
    """A tap on what each peer of the target sends: blocks come on a drafter's stream, never on a router's."""
    async with cluster(lock_step=True) as c:
        (target,) = c.targets.values()
        (drafter,) = c.drafters.values()
        heard: list[tuple[str, Decoded]] = []
        receive = target.receive

        def tap(stream: str, frame: Decoded) -> None:
            heard.append((stream, frame))
            receive(stream, frame)

        target.receive = tap  # type: ignore[method-assign]
        await c.tokens(c.generation())
        blocks = [stream for stream, frame in heard for m in frame.messages if isinstance(m, Block)]
        assert blocks
        assert all(stream.startswith(drafter.peer_id) for stream in blocks)
        assert any(not stream.startswith(drafter.peer_id) for stream, _ in heard), "a router spoke too"


class GatedEngine(WrappedEngine):
    """Holds steps that verify a block of session `held` until `gate` is set."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.held = ""
        self.holding = asyncio.Event()
        self.gate = asyncio.Event()

    async def step(self, plan: StepPlan) -> list[Outcome]:
        if any(row.session == self.held and row.drafted > 0 for row in plan.rows) and not self.gate.is_set():
            self.holding.set()
            await self.gate.wait()
        return await super().step(plan)


async def test_drafting_overlaps_the_verification_of_another_session():
    """Enforces the order: the target's step with A's block ends only after B's draft."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[0]

    async with cluster(wrap_engine=gated) as c:
        (drafter,) = c.drafters.values()
        (target,) = c.targets.values()
        first = c.generation(session="A")
        second = c.generation(session="B")
        gates[0].held = "A"
        a = asyncio.create_task(c.tokens(first))
        await gates[0].holding.wait()  # A's block is being verified
        b = asyncio.create_task(c.tokens(second))
        done = [e for e in drafter.timeline.events() if e.name == "drafted"]
        await eventually(
            lambda: any("B" in e.sessions for e in drafter.timeline.events() if e.name == "drafted"),
            "B is drafted while A's step has not ended",
        )
        assert not any("B" in e.sessions for e in done)
        last = target.timeline.events()[-1]
        verifying = [e for e in target.timeline.events() if e.name in ("verify", "decided")][-1]
        assert verifying.name == "verify"
        assert verifying.sessions == ("A",)
        assert last.order >= verifying.order
        gates[0].gate.set()
        c.hurry()
        assert await a == plain_greedy((1, 2, 3), 40)
        assert await b == plain_greedy((1, 2, 3), 40)


def _lose_next_verdict(c: Cluster) -> list[Verdict]:
    """Makes the drafter lose one verdict."""
    (drafter,) = c.drafters.values()
    lost: list[Verdict] = []
    deliver = drafter.receive

    def lossy(address: str, frame: Decoded) -> None:
        if not lost:
            lost.extend(m for m in frame.messages if isinstance(m, Verdict))
            frame = Decoded(tuple(m for m in frame.messages if m not in lost))
        deliver(address, frame)

    drafter.receive = lossy  # type: ignore[method-assign]
    return lost


def _corrupt_draft_sequence(drafter: Drafter) -> None:
    """Changes the latest token that the drafter holds for its only session."""
    (held,) = drafter.scheduler.sessions.all.values()
    wrong = (held.prefix.tokens[-1] + 1) % VOCABULARY
    held.prefix.truncate(len(held.prefix) - 1)
    held.prefix.append(wrong)


@pytest.mark.parametrize(
    ("fault", "noticed"), [("lost verdict", ["verdict_gap"]), ("wrong token", ["verdict_mismatch", "resync"])]
)
async def test_a_drafter_recovers_from_a_fault_and_its_blocks_are_accepted_again(fault, noticed):
    """The drafter catches up, or opens the session again from the ledger."""
    async with cluster(draft_logits=SURE) as c:
        (drafter,) = c.drafters.values()
        counts = drafter.scheduler.counts
        lost = _lose_next_verdict(c) if fault == "lost verdict" else []
        tokens: list[int] = []
        rounds = 0
        accepted: list[int] = []  # in each round since the drafter noticed
        recovered = False
        async for event in c.router.generate(c.generation(max_len=503)):
            if not isinstance(event, CommittedTokens):
                continue
            tokens += event.tokens
            rounds += 1
            if fault == "wrong token" and rounds == 5:
                _corrupt_draft_sequence(drafter)
            if any(counts[kind] for kind in noticed):
                accepted.append(event.accepted)
            if sum(accepted[-10:]) > 20:  # about four of each block
                recovered = True
                c.hurry()
        assert len(lost) == (fault == "lost verdict")
        assert tokens == plain_greedy((1, 2, 3), 500)
        assert recovered


async def test_preemption_changes_no_token():
    """The youngest give their pages up, and compute them again when there is room."""
    async with cluster(pages=32) as c:
        prompts = [(1 + i, 2) for i in range(12)]
        asked = [c.generation(prompt=p, max_len=len(p) + 100) for p in prompts]
        texts = await asyncio.gather(*(c.tokens(generation) for generation in asked))
        assert texts == [plain_greedy(prompt, 100) for prompt in prompts]
        (target,) = c.targets.values()
        assert target.scheduler.admission.preempted > 0


async def test_drafting_ahead_covers_several_outcomes_and_hits_some():
    """Right guesses are at the target before the verdict that they build on."""
    async with cluster(draft_logits=UNSURE) as c:
        prompt = (1, 2, 3)
        (drafter,) = c.drafters.values()
        counts = drafter.scheduler.counts
        for _ in range(5):  # a busy machine may draft too late to be asked for much
            assert await c.tokens(c.generation(prompt=prompt, max_len=203)) == plain_greedy(prompt, 200)
            if counts["guess_hit"] > 5:
                break
        assert counts["guess_hit"] > 5
        assert counts["guesses"] > counts["guess_hit"] + counts["guess_miss"]


async def test_lock_step_and_adaptive_loop_commit_the_same_text():
    """The slow loop is the specification of the fast one: draft, verify, commit."""
    rules = [Sampling(temperature=0.0), Sampling(temperature=0.8)]

    async def answers(lock_step: bool) -> tuple[list[list[int]], list[int], Mapping[str, int]]:
        """Texts, how many tokens of each were drafted, and what the drafter counted."""
        async with cluster(draft_logits=UNSURE, lock_step=lock_step) as c:
            asked = [c.generation(prompt=(1 + i, 2), max_len=62, sampling=rules[i % 2]) for i in range(4)]
            events = await asyncio.gather(*(emitted(c, generation) for generation in asked))
            (drafter,) = c.drafters.values()
            texts = [[token for emit in emits for token in emit.tokens] for emits in events]
            return texts, [sum(emit.accepted for emit in emits) for emits in events], drafter.scheduler.counts

    fast, _, counted = await answers(lock_step=False)
    slow, accepted, counted_slowly = await answers(lock_step=True)
    assert slow == fast
    assert min(accepted) > 0, "lock step drafts for every round"
    assert counted_slowly["blocks"] > 0
    assert "guesses" not in counted_slowly, "lock step drafts nothing ahead"
    assert counted["guesses"] > 0, "the other loop does"


async def emitted(c: Cluster, generation: Generation) -> list[CommittedTokens]:
    return [event async for event in c.router.generate(generation) if isinstance(event, CommittedTokens)]


async def test_a_useless_drafter_changes_no_token():
    async with cluster(draft_logits=-LOGITS) as c:
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_losing_a_drafter_changes_no_token(temperature):
    sampling = Sampling(temperature=temperature)
    async with cluster(drafters=0) as c:
        c.hurry()
        undisturbed = await c.tokens(c.generation(max_len=103, sampling=sampling, draft_tokens=0))
    async with cluster(drafters=2) as c:
        asked = c.generation(max_len=103, sampling=sampling)
        tokens: list[int] = []
        lost: str | None = None
        async for event in c.router.generate(asked):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
                if len(tokens) >= 20 and lost is None:
                    lost = next((a for a, d in c.drafters.items() if not d.is_idle), None)
                    if lost is not None:
                        await c.servers[lost].stop(0)
        assert lost is not None, "no drafter had the session while it ran"
        assert tokens == undisturbed


async def test_losing_a_target_changes_no_token():
    async with cluster(targets=2) as c:
        tokens: list[int] = []
        async for event in c.router.generate(c.generation(max_len=103)):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
                if len(tokens) >= 20 and len(c.router.reachable) == 3:
                    used = next(a for a, t in c.targets.items() if not t.is_idle)
                    await c.servers[used].stop(0)
        assert tokens == plain_greedy((1, 2, 3), 100)


class Stalled:
    """A drafting method that stops while `go_on` is clear; the drafter's streams stay up."""

    def __init__(self, method: DraftingMethod) -> None:
        self.go_on = threading.Event()
        self.shapes = method.shapes
        self.tokens_per_forward = method.tokens_per_forward
        self.go_on.set()
        self._method = method
        self.open = method.open
        self.committed = method.committed
        self.close = method.close

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        assert self.go_on.wait(60), "the test has forgotten this drafter"
        return self._method.draft(requests)

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        assert self.go_on.wait(60), "the test has forgotten this drafter"
        return self._method.draft_ahead(requests, interrupted, early)


async def test_the_sessions_of_a_stalled_drafter_move_to_another():
    methods: list[Stalled] = []

    def stallable(method: DraftingMethod) -> DraftingMethod:
        methods.append(Stalled(method))
        return methods[-1]

    async with cluster(drafters=2, wrap_method=stallable) as c:
        still, other = c.drafters.values()
        stalled = methods[0]
        generations = [c.generation(prompt=(1 + i, 2), max_len=402) for i in range(4)]
        texts = [asyncio.create_task(c.tokens(generation)) for generation in generations]
        drafted_for = still.scheduler.sessions.all.values()
        await eventually(
            lambda: len(drafted_for) > 0 and all(session.prefix.length > 40 for session in drafted_for), "it drafts"
        )
        stalled.go_on.clear()
        its = set(still.scheduler.sessions.all)
        try:
            await eventually(lambda: its <= other.scheduler.sessions.all.keys(), "the other one has its sessions")
        finally:
            stalled.go_on.set()
        c.hurry()
        assert await asyncio.gather(*texts) == [plain_greedy(g.prompt, 400) for g in generations]


async def test_without_targets_a_session_waits_and_then_fails():
    """Held for as long as the router waits, during which a target might come back."""
    async with cluster(target_wait_s=1) as c:
        got: list[int] = []

        async def follow() -> None:
            async for event in c.router.generate(c.generation(max_len=203)):
                if isinstance(event, CommittedTokens):
                    got.extend(event.tokens)

        following = asyncio.create_task(follow())
        await eventually(lambda: len(got) > 10, "it has begun")
        (server,) = [c.servers[address] for address in c.targets]
        await server.stop(0)
        with pytest.raises(TargetLostError, match="no target replica could be reached"):
            await asyncio.wait_for(following, 30)
        assert got == plain_greedy((1, 2, 3), 200)[: len(got)]


async def test_draining_refuses_new_sessions_and_finishes_running_ones():
    async with cluster() as c:
        running = asyncio.create_task(c.tokens(c.generation()))
        await eventually(lambda: not c.router.is_idle, "it runs")
        c.router.drain()
        assert not c.router.is_ready
        with pytest.raises(DrainingError, match="takes no new requests"):
            await c.tokens(c.generation())
        assert await running == plain_greedy((1, 2, 3), 40)


async def test_fifty_cancelled_requests_leave_nothing_behind():
    async with cluster() as c:

        async def begin_and_leave(index: int) -> None:
            stream = c.router.generate(c.generation(prompt=(1 + index % 30,), max_len=500))
            async for event in stream:
                if isinstance(event, CommittedTokens):
                    break
            await stream.aclose()

        await asyncio.gather(*(begin_and_leave(i) for i in range(50)))
        assert c.router.is_idle
    # The harness has checked that router, target and drafter hold nothing any more.


def test_the_toy_is_not_trivial():
    """The reference text must have several different tokens, or equality would show little."""
    assert len(set(plain_greedy((1, 2, 3), 40))) > 3
    assert torch.isfinite(LOGITS).all()
