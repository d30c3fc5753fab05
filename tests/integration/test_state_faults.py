"""Acceptance of a head that reads hidden states recovers from each fault, over real gRPC.

The head (`state_head.py`) is right with the right states, and almost never right otherwise.
"""

import asyncio

import pytest

from actors.net.streams import StatesOutbox
from cluster.verification import hidden_state_sender
from protos.messages import Message, States
from tests.integration.harness import PAGE_SIZE, Cluster, eventually
from tests.integration.rounds import acceptance, computed, is_settled, resumed, watched
from tests.integration.state_head import head_reading, text_after
from tests.lossless.states import LAYOUT

PROMPT = tuple(1 + n % 29 for n in range(200))  # four chunks
OTHER = tuple(1 + n % 23 for n in range(60))
NEW = 80
IDS = ("reads all", "reads the latest")
both_heads = pytest.mark.parametrize("reading", [head_reading(), head_reading(reads_latest=True)], ids=IDS)


async def answered(c: Cluster, session: str, prompt: tuple[int, ...], new: int = NEW) -> None:
    """Generates an answer, and asserts that it is the target's own text."""
    generation = c.generation(session=session, prompt=prompt, max_len=len(prompt) + new)
    assert await c.tokens(generation) == text_after(prompt, new)


@both_heads
async def test_a_killed_drafters_successor_drafts_within_two_rounds(reading):
    """The drafter's streams break without a message, as for a killed process. The target recomputes nothing."""
    async with watched(reading, drafters=2) as (c, engine):
        (target,) = c.targets.values()
        engine.may_step = lambda: is_settled(target) and len(engine.decided("s")) < 6
        running = asyncio.create_task(answered(c, "s", PROMPT))
        await eventually(lambda: engine.is_held and len(engine.decided("s")) == 6, "a step in mid-answer is under way")
        address, killed = next((a, d) for a, d in c.drafters.items() if not d.is_idle)
        (successor,) = (d for d in c.drafters.values() if d is not killed)
        await c.servers[address].stop(0)
        await killed.close()
        session = target.scheduler.admission.running["s"]
        await eventually(lambda: (session.drafter or "").startswith(successor.peer_id), "the successor attaches")
        attached = len(engine.rounds["s"]) + 1  # the running step was planned before
        engine.may_step = lambda: is_settled(target)
        await running
        rounds = engine.rounds["s"]
        assert any(one.drafted for one in rounds[attached : attached + 2])
        assert acceptance(rounds[attached:]) == acceptance(rounds[:attached]) == 1
        assert successor.scheduler.counts["blocks"] >= 5
        assert computed(rounds) == len(PROMPT) + NEW - 1, "each token once, but the last, which is not fed"


@both_heads
async def test_drafts_after_a_prefix_hit_are_fully_accepted(reading):
    async with watched(reading) as (c, engine):
        await answered(c, "read", PROMPT)
        await answered(c, "whole", PROMPT)
        partial = (*PROMPT[:100], *OTHER)
        await answered(c, "partial", partial)
        hits = {name: rounds[0].start for name, rounds in engine.rounds.items()}
        assert hits == {"read": 0, "whole": _pages_of(len(PROMPT) - 1), "partial": _pages_of(100)}
        assert computed(engine.rounds["whole"]) == len(PROMPT) + NEW - 1 - hits["whole"], "the rest, once"
        assert computed(engine.rounds["partial"]) == len(partial) + NEW - 1 - hits["partial"]
        assert {acceptance(rounds) for rounds in engine.rounds.values()} == {1.0}
        accepted = [sum(one.accepted for one in rounds) for rounds in engine.rounds.values()]
        assert min(accepted) > NEW / 2


def _pages_of(tokens: int) -> int:
    """Returns the number of tokens in whole pages."""
    return tokens // PAGE_SIZE * PAGE_SIZE


@both_heads
async def test_drafts_after_a_preemption_are_fully_accepted(reading):
    """Four sessions need 72 pages; preempted pages are recomputed or found in the cache."""
    async with watched(reading, pages=50) as (c, engine):
        prompts = {f"s{n}": (n, *PROMPT) for n in range(4)}
        await asyncio.gather(*(answered(c, name, prompt) for name, prompt in prompts.items()))
        (target,) = c.targets.values()
        assert target.scheduler.admission.preempted > 0
        came_back = {name: at for name in prompts if (at := resumed(engine.decided(name)))}
        assert came_back, "one had begun its answer when it was preempted"
        for name, indices in came_back.items():
            rounds = engine.decided(name)
            for at in indices:
                assert any(one.drafted for one in rounds[at : at + 2]), "within two rounds"
        assert {acceptance(engine.rounds[name]) for name in prompts} == {1.0}


@pytest.mark.parametrize("reads_latest", [False, True], ids=IDS)
async def test_sessions_beyond_the_heads_context_continue_without_drafts(reads_latest):
    most = 120
    async with watched(head_reading(reads_latest, most)) as (c, engine):
        sessions = {"grows": OTHER, "is longer": PROMPT, "fits": OTHER[::-1]}
        news = {"grows": 2 * NEW, "is longer": NEW, "fits": 50}
        await asyncio.gather(*(answered(c, name, prompt, news[name]) for name, prompt in sessions.items()))
        before = [one for one in engine.decided("grows") if one.start + one.known < most]
        beyond = [one for one in engine.decided("grows") if one.start + one.known >= most]
        assert len(beyond) > NEW
        assert not any(one.drafted for one in [*beyond, *engine.rounds["is longer"]])
        assert acceptance(before) == acceptance(engine.rounds["fits"]) == 1
        (target,) = c.targets.values()
        assert target.scheduler.draft_quality.desyncs == 0
        await answered(c, "comes later", OTHER[:30])
        assert acceptance(engine.rounds["comes later"]) == 1
        assert c.router.sessions.recoveries == {}, "nobody takes the drafter for a bad one"


async def test_stuck_states_of_one_prompt_delay_no_other_session(monkeypatch):
    """A whole answer is drafted and decided while a drafter's stream for hidden states is stuck.

    The long prompt's answer continues without speculation until its states arrive.
    """
    monkeypatch.setattr(hidden_state_sender, "VERDICT_STATES_BYTES", 8 * LAYOUT.row_bytes)
    let_go = asyncio.Event()
    left: list[Message] = []
    take = StatesOutbox.take

    async def stuck(outbox: StatesOutbox) -> list[Message]:
        frame = await take(outbox)
        if any(isinstance(message, States) for message in frame):
            await let_go.wait()
            left.extend(frame)
        return frame

    monkeypatch.setattr(StatesOutbox, "take", stuck)
    async with watched(head_reading()) as (c, engine):
        (target,) = c.targets.values()
        engine.may_step = lambda: True
        long = asyncio.create_task(answered(c, "long", PROMPT, 300))
        await eventually(lambda: len(engine.decided("long")) > 0, "its prompt is read")
        running = target.scheduler.admission.running
        engine.may_step = lambda: "short" in running and running["short"].drafter is not None
        await eventually(lambda: engine.is_held, "a step without the other is under way")
        short = asyncio.create_task(answered(c, "short", (1, 2, 3)))
        await eventually(engine.may_step, "a drafter is there before its prompt is read")
        engine.may_step = lambda: True
        await short
        plain = len(engine.decided("long"))
        assert not left, "no state of the prompt has left the target"
        assert acceptance(engine.rounds["short"]) == 1
        assert plain > 5
        assert not any(one.drafted for one in engine.rounds["long"])
        let_go.set()
        engine.may_step = lambda: is_settled(target)
        await long
        assert left
        assert acceptance(engine.decided("long")[plain:]) == 1
