"""A drafter whose drafts become noise, over real streams.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.routing.session import Generation
from protos.messages import DraftRequest
from tests.integration.harness import VOCABULARY, Cluster, cluster, plain_greedy
from tests.integration.test_pipeline import SURE


class TurnsToNoise:
    """A drafting method that proposes what the target never says, once it was told so many tokens of a session."""

    def __init__(self, method: DraftingMethod, tokens: int = 200) -> None:
        self.shapes = method.shapes
        self.tokens_per_forward = method.tokens_per_forward
        self.open = method.open
        self.committed = method.committed
        self.close = method.close
        self._method = method
        self._after = tokens

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._spoilt(proposal) for proposal in self._method.draft(requests)]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return [self._spoilt(proposal) for proposal in self._method.draft_ahead(requests, interrupted)]

    def _spoilt(self, proposal: Proposal) -> Proposal:
        if proposal.base_len < self._after:
            return proposal
        noise = tuple([(token + 1) % VOCABULARY for token in proposal.tokens])
        return replace(proposal, tree=replace(proposal.tree, tokens=noise))


async def test_a_drafter_that_turns_to_noise_is_found_replaced_and_at_last_left_out(caplog):
    """Each step over real streams; every text is the target's own to its end."""
    async with cluster(drafters=2, draft_logits=SURE, lock_step=True) as c:
        c.pace.step_s = 0.001
        bad, good = c.drafters
        c.drafters[bad]._method = TurnsToNoise(c.drafters[bad]._method)
        texts = []
        steps: Mapping[tuple[str, str], int] = {}
        for _ in range(60):  # a few as a rule; on a machine that stalls, breakers keep sessions from both for seconds
            generations = [c.generation(prompt=(1 + i, 2), max_len=500) for i in range(4)]
            texts += [(g, tokens) for g, tokens in zip(generations, await _all(c, generations), strict=True)]
            steps = c.router.remedies
            if (bad, "given up") in steps:
                break
        assert all(tokens == plain_greedy(g.prompt, 498) for g, tokens in texts)
        left = [steps.get((bad, step), 0) for step in ("replaced", "plain")]  # whether or not the other takes any
        assert steps[bad, "resynced"] >= 1
        assert sum(left) >= 3, "one bad session could be that session's fault"
        assert steps[bad, "given up"] >= 1
        assert not [step for drafter, step in steps if drafter == good]
        assert f"drafter {bad} has something accepted of 0 % of its blocks" in caplog.text


async def _all(c: Cluster, generations: Sequence[Generation]) -> list[list[int]]:
    return await asyncio.gather(*(c.tokens(generation) for generation in generations))
