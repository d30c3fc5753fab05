"""A drafter whose drafts become noise, over real streams.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
from collections.abc import Mapping, Sequence

from cluster.routing.ledger import Generation
from tests.exhaustive.noisy_drafter import TurnsToNoise
from tests.integration.harness import VOCABULARY, Cluster, cluster, plain_greedy
from tests.integration.test_pipeline import SURE

GOOD_TOKENS = 200  # of a session, its prompt included


async def test_a_drafter_that_turns_to_noise_is_found_replaced_and_at_last_left_out(caplog):
    """Each step over real streams; every text is the target's own to its end."""
    async with cluster(drafters=2, draft_logits=SURE, lock_step=True) as c:
        c.pace.step_s = 0.001
        bad, good = c.drafters
        c.drafters[bad]._method = TurnsToNoise(
            c.drafters[bad]._method, lambda proposal: proposal.base_len >= GOOD_TOKENS, VOCABULARY
        )
        texts = []
        steps: Mapping[tuple[str, str], int] = {}
        for _ in range(60):  # a few as a rule; on a machine that stalls, breakers keep sessions from both for seconds
            generations = [c.generation(prompt=(1 + i, 2), max_len=500) for i in range(4)]
            texts += [(g, tokens) for g, tokens in zip(generations, await _all(c, generations), strict=True)]
            steps = c.router.sessions.remedies.by_step()
            if (bad, "given up") in steps:
                break
        assert all(tokens == plain_greedy(g.prompt, 498) for g, tokens in texts)
        left = [
            steps.get((bad, step), 0) for step in ("replaced", "non_speculative")
        ]  # whether or not the other takes any
        assert steps[bad, "resynced"] >= 1
        assert sum(left) >= 3, "one bad session could be that session's fault"
        assert steps[bad, "given up"] >= 1
        assert not [step for drafter, step in steps if drafter == good]
        assert f"drafter {bad}: target accepts tokens of 0 % of its blocks" in caplog.text


async def _all(c: Cluster, generations: Sequence[Generation]) -> list[list[int]]:
    return await asyncio.gather(*(c.tokens(generation) for generation in generations))
