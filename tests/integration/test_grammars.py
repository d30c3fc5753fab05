"""Over real streams, sessions with a grammar are refused individually, unchanged by failures, and audited."""

import asyncio

import pytest
from llguidance import LLMatcher

from cluster.config import AuditConfig
from cluster.errors import RequestError
from cluster.routing.ledger import CommittedTokens
from protos.messages import Acceptance, Sampling
from tests.integration.harness import VOCABULARY, Cluster, cluster, eventually, plain_greedy
from tests.lossless.test_grammars import LETTERS, LISTS, compiler
from tests.session_events import events_of

GRAMMARS = compiler(LETTERS[:VOCABULARY])
END = 0
LONG = LLMatcher.grammar_from_lark('start: "(" list ")"\nlist: /[abc]{1,3}/ ("," /[abc]{1,3}/){40}')
SAMPLED = Sampling(temperature=1.0)


def asked(grammar: str, **changes: object) -> dict[str, object]:
    return {"grammar": grammar, "max_len": 203, "stop_ids": (END,), "sampling": SAMPLED, **changes}


async def plainly(grammar: str, **changes: object) -> list[int]:
    async with cluster(drafters=0, grammars=GRAMMARS) as c:
        c.hurry()
        return await c.tokens(c.generation(**asked(grammar, **changes), draft_tokens=0))


def written(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token != END)


@pytest.mark.parametrize("lost", ["target", "drafter"])
async def test_losing_a_replica_changes_no_token(lost):
    """The new target replays the ledger's tokens through the grammar."""
    plain = await plainly(LONG)
    async with cluster(targets=2, drafters=2, grammars=GRAMMARS) as c:
        tokens: list[int] = []
        async for event in events_of(c.router, c.generation(**asked(LONG))):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
                if len(tokens) >= 20 and len(c.router.reachable) == 4:
                    await stop_one(c, lost)
        assert tokens == plain
    assert written(plain).endswith(")")


async def stop_one(c: Cluster, kind: str) -> None:
    pool = c.targets if kind == "target" else c.drafters
    busy = [address for address, peer in pool.items() if not peer.is_idle]
    if busy:
        await c.servers[busy[0]].stop(0)


async def test_an_invalid_grammar_is_refused_without_affecting_others():
    async with cluster(grammars=GRAMMARS) as c:
        other = asyncio.create_task(c.tokens(c.generation()))
        with pytest.raises(RequestError, match="unclosed group"):
            await c.tokens(c.generation(**asked(LLMatcher.grammar_from_regex("(a"))))
        assert await other == plain_greedy((1, 2, 3), 40)


async def test_a_target_without_grammars_refuses_them():
    async with cluster() as c:
        with pytest.raises(RequestError, match="the target supports none"):
            await c.tokens(c.generation(**asked(LISTS)))


@pytest.mark.parametrize("acceptance", list(Acceptance), ids=lambda rule: rule.name.lower())
async def test_audits_apply_the_grammar(acceptance):
    async with cluster(targets=2, audit=AuditConfig(share=1.0), grammars=GRAMMARS) as c:
        c.pace.step_s = 0.005
        sampling = SAMPLED if acceptance is Acceptance.COUPLED else Sampling(temperature=0.0)
        asks = [c.generation(**asked(LISTS, seed=seed, sampling=sampling, acceptance=acceptance)) for seed in range(3)]
        await asyncio.gather(*map(c.tokens, asks))
        await eventually(lambda: c.router.audits.counts["equal"] == 3, "all are audited and equal")
        assert c.differences == []
