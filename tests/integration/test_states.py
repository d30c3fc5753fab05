"""Hidden states over real gRPC: they reach the method that reads them, with verdicts and apart from them."""

import asyncio

import pytest

from cluster.verification import hidden_state_sender
from tests.integration.harness import CHECKED, cluster, eventually, plain_greedy

PROMPT = tuple(1 + n % 29 for n in range(300))  # five chunks


@pytest.mark.parametrize("ride_bytes", [hidden_state_sender.RIDE_BYTES, 0], ids=["with verdicts", "apart"])
async def test_a_long_prompt_and_what_is_decoded_reach_the_drafting_method(ride_bytes, monkeypatch):
    """The method checks every row against its own text."""
    monkeypatch.setattr(hidden_state_sender, "RIDE_BYTES", ride_bytes)
    async with cluster(reading=CHECKED) as c:
        found = await c.tokens(c.generation(prompt=PROMPT, max_len=340))
        assert found == plain_greedy(PROMPT, 40)
        (target,) = c.targets.values()
        (drafter,) = c.drafters.values()
        rows = target.scheduler.feeds.rows
        assert rows["verdict" if ride_bytes else "apart"] > 0
        assert (rows["verdict"] > 0) == (ride_bytes > 0)
        assert rows.total() >= len(PROMPT) + 30
        assert target.scheduler.counts.accepted_tokens > 10, "nothing was drafted from states"
        assert drafter.scheduler.counts["states"] >= len(PROMPT) + 30


async def test_a_drafter_that_takes_over_finds_the_states_of_what_was_computed_before_it_came():
    async with cluster(drafters=2, reading=CHECKED) as c:
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
        assert await running == plain_greedy(PROMPT, 120)
