"""Hidden states over real gRPC reach the drafting method, with verdicts or in separate messages."""

import asyncio

import pytest

from cluster.verification import hidden_state_sender
from tests.integration.harness import CHECKED, cluster, eventually, plain_greedy
from tests.integration.rounds import watched

PROMPT = tuple(1 + n % 29 for n in range(300))  # five chunks


@pytest.mark.parametrize("ride_bytes", [hidden_state_sender.RIDE_BYTES, 0], ids=["with verdicts", "apart"])
async def test_states_of_prompt_and_answer_reach_the_drafting_method(ride_bytes, monkeypatch):
    """The method compares every row with its own text."""
    monkeypatch.setattr(hidden_state_sender, "RIDE_BYTES", ride_bytes)
    async with watched(CHECKED) as (c, _):
        found = await c.tokens(c.generation(prompt=PROMPT, max_len=340))
        assert found == plain_greedy(PROMPT, 40)
        (target,) = c.targets.values()
        (drafter,) = c.drafters.values()
        rows = target.scheduler.feeds.rows
        assert rows["verdict" if ride_bytes else "apart"] > 0
        assert (rows["verdict"] > 0) == (ride_bytes > 0)
        assert rows.total() >= len(PROMPT) + 30
        assert c.accepted > 10, "nothing was drafted from states"
        assert drafter.scheduler.counts["states"] >= len(PROMPT) + 30


async def test_a_replacement_drafter_receives_the_states_computed_before():
    async with cluster(drafters=2, reading=CHECKED) as c:
        c.pace.step_s = 0.1  # so that the answer lasts until the other drafter has drafted
        running = asyncio.create_task(c.tokens(c.generation(prompt=PROMPT, max_len=420)))
        await eventually(lambda: any(d.scheduler.counts["blocks"] for d in c.drafters.values()), "one has drafted")
        address, first = next((a, d) for a, d in c.drafters.items() if d.scheduler.counts["blocks"])
        (second,) = (d for d in c.drafters.values() if d is not first)
        (target,) = c.targets.values()
        fed = target.scheduler.feeds.rows.total()
        await c.servers[address].stop(0)
        await first.close()
        await eventually(lambda: second.scheduler.counts["blocks"] > 0, "the other drafts")
        assert second.scheduler.counts["states"] >= len(PROMPT)
        assert target.scheduler.feeds.rows.total() > fed
        c.hurry()
        assert await running == plain_greedy(PROMPT, 120)
