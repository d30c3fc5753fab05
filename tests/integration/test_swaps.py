"""Over real streams, exchanges of draft weights change no text before, during or afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.drafter import Drafter
from actors.drafters.model.draft_model import DraftModel, DraftWeights
from actors.learning.reload import DraftReload, LearnedDraft, Version
from actors.learning.versions import VersionFolder
from cluster.errors import ModelError
from cluster.learning import Manifest, State
from protos.codec import Decoded
from protos.messages import Acceptance, Block, Sampling
from tests.integration.harness import LOGITS, PAGE_SIZE, PAGES, VOCABULARY, Cluster, cluster, plain_greedy
from tests.toys import ToyRunner, toy_draft_model

UNSURE = LOGITS + 0.3 * LOGITS.flip(0)  # usually right, and unsure enough for trees
USELESS = -4 * LOGITS  # its first choice is the least likely token
TOKENS = 60
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=1.0)
TARGET = "fingerprint"


def weights(logits: Tensor) -> DraftWeights:
    return DraftWeights(ToyRunner(logits), torch.arange(VOCABULARY))


@asynccontextmanager
async def drafting(logits: Tensor, lock_step: bool = False) -> AsyncIterator[tuple[Cluster, Drafter, DraftModel]]:
    """Runs a cluster; also yields its drafter and the draft model, which can load versions."""
    method = toy_draft_model(ToyRunner(logits), PAGES, PAGE_SIZE, top_k=8, load=load)
    async with cluster(wrap_method=lambda _: method, lock_step=lock_step) as c:
        (drafter,) = c.drafters.values()
        yield c, drafter, method


def count_trees(c: Cluster) -> list[int]:
    """Returns the counts of received blocks: chains, and trees with branches."""
    (target,) = c.targets.values()
    found = [0, 0]
    receive = target.receive

    def tap(stream: str, frame: Decoded) -> None:
        for message in frame.messages:
            if isinstance(message, Block):
                found[not message.tree.is_chain] += 1
        receive(stream, frame)

    target.receive = tap  # type: ignore[method-assign]
    return found


async def swap_until(done: Callable[[], bool], drafter: Drafter, method: DraftModel, period_s: float = 0.1) -> int:
    """Alternates good and useless weights; returns the number of exchanges."""
    swaps = 0
    while not done():
        swaps += 1
        exchange = partial(method.exchange, weights(USELESS if swaps % 3 == 2 else UNSURE))
        await drafter.exchange(exchange, swaps)
        await asyncio.sleep(period_s)
    return swaps


@pytest.mark.parametrize("acceptance", list(Acceptance), ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("lock_step", [False, True], ids=["adaptive", "lock step"])
async def test_greedy_texts_are_the_same_while_weights_are_exchanged(acceptance: Acceptance, lock_step: bool) -> None:
    """Coupling uses trees and chains; rejection sampling uses only chains."""
    async with drafting(UNSURE, lock_step) as (c, drafter, method):
        c.pace.step_s = 0.04
        blocks = count_trees(c)
        prompts = [(1 + i, 2) for i in range(6)]
        asked = [
            c.generation(prompt=p, max_len=len(p) + TOKENS, acceptance=acceptance, draft_tokens=8) for p in prompts
        ]
        streams = [asyncio.create_task(c.tokens(generation)) for generation in asked]
        swaps = await swap_until(lambda: all(stream.done() for stream in streams), drafter, method)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert await stream == plain_greedy(prompt, TOKENS)
        assert swaps > 3
        assert sum(blocks) > 10
        after = await c.tokens(c.generation(prompt=(1, 2), max_len=2 + TOKENS, acceptance=acceptance))
        assert after == plain_greedy((1, 2), TOKENS)


async def test_seeded_texts_are_the_same_while_weights_are_exchanged() -> None:
    async with drafting(UNSURE) as (c, drafter, method):
        c.pace.step_s = 0.04
        blocks = count_trees(c)

        def asked(seed: int, draft_tokens: int) -> asyncio.Task[list[int]]:
            generation = c.generation(max_len=3 + TOKENS, sampling=SEEDED, seed=seed, draft_tokens=draft_tokens)
            return asyncio.create_task(c.tokens(generation))

        plain = await asyncio.gather(*[asked(seed, 0) for seed in range(6)])
        before = await asyncio.gather(*[asked(seed, 8) for seed in range(6)])
        streams = [asked(seed, 8) for seed in range(6)]
        swaps = await swap_until(lambda: all(stream.done() for stream in streams), drafter, method)
        during = await asyncio.gather(*streams)
        after = await asyncio.gather(*[asked(seed, 8) for seed in range(6)])
        assert before == during == after == plain
        assert swaps > 3
        assert min(blocks) > 0, "chains and trees"


def manifest(parent: int) -> Manifest:
    return Manifest(
        version=1,
        parent=parent,
        created=0.0,
        state=State.CANDIDATE,
        reason="better",
        method="draft_model",
        target=TARGET,
        examples=300,
        tokens=17_000,
        seconds=60.0,
    )


def add(versions: VersionFolder, logits: Tensor) -> None:
    added = versions.add(manifest(versions.current()), lambda folder: torch.save(logits, folder / "logits.pt"))
    versions.promote(added.version)


def load(folder: Path) -> DraftWeights:
    logits: Tensor = torch.load(folder / "logits.pt")
    if not torch.isfinite(logits).all():
        raise ModelError(f"{folder} holds NaN or infinite weights")
    return weights(logits)


async def test_a_bad_version_is_rolled_back_and_a_broken_one_refused_while_texts_stay(tmp_path: Path) -> None:
    """Texts stay correct throughout; low acceptance in production reveals the bad version."""
    torch.save(UNSURE, tmp_path / "logits.pt")
    versions = VersionFolder(tmp_path)
    async with drafting(USELESS, lock_step=True) as (c, drafter, method):
        reload = DraftReload(LearnedDraft(versions, Version(0, tmp_path), TARGET, "draft"), method, drafter)

        async def serve() -> None:
            asked = [c.generation(prompt=(1 + i, 2), max_len=42) for i in range(16)]
            texts = await asyncio.gather(*[c.tokens(generation) for generation in asked])
            assert texts == [plain_greedy((1 + i, 2), 40) for i in range(16)]

        c.pace.step_s = 0.005
        add(versions, UNSURE)
        await eventually_checked(reload, serve, lambda: drafter.version_watch.blocks > 256)
        assert reload.version == 1
        add(versions, USELESS)
        await reload.check()
        assert reload.version == 2
        await eventually_checked(reload, serve, lambda: reload.version == 1)
        assert reload.counts == {"swapped": 3, "refused": 0, "rolled_back": 1, "failed": 0}
        assert [each.state for each in versions.history()] == [State.CURRENT, State.ROLLED_BACK]
        add(versions, torch.full_like(UNSURE, torch.nan))
        await reload.check()
        assert (reload.version, reload.counts["refused"]) == (1, 1)
        await serve()
    reload.close()


async def eventually_checked(reload: DraftReload, serve: Callable[[], object], done: Callable[[], bool]) -> None:
    """Serves until the acceptance check has the expected result; fails after twenty rounds."""
    for _ in range(20):
        await reload.check()
        if done():
            return
        await serve()  # type: ignore[misc]
    raise AssertionError(f"waited in vain: {reload.summary()}")
