"""A head learns from a cluster's traffic, is promoted, and takes over while sessions run."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.compute.hidden_states import StateCapture
from actors.drafters.registry import DraftSetup, capture_spec, create_method, state_bounds, states_format
from actors.engine.runner import ModelRunner
from actors.learning.examples import ExampleStore, ExampleWriter, StateRecorder
from actors.learning.head_loading import head_learning, states_kind
from actors.learning.reload import DraftReload, LearnedDraft, Version
from actors.learning.trainable import fingerprint_of
from actors.learning.trainer import Draft, Trainer
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import load_model
from cluster.config import DraftPool, LearningOptions
from cluster.drafting.method import DraftingMethod, ExchangesWeights
from cluster.learning import Source, State
from cluster.routing.ledger import Generation
from protos.messages import Sampling
from tests.integration.harness import PAGE_SIZE, Cluster, StateReading, cluster, eventually
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, checkpoint

VOCABULARY = 96
CONTEXT = 64
TOKENS = 40
PROMPTS = 160
FINGERPRINT = "target"
HEADS = {"eagle": "eagle3", "medusa": "medusa", "mlp_speculator": "mlp_speculator"}


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    drawn = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(VOCABULARY, (5,), generator=drawn).tolist()) for _ in range(count)]


class World:
    """One deployment's folder, and the parts of its processes that learn."""

    def __init__(self, folder: Path, method: str, project: str = "auto") -> None:
        self.head = checkpoint(HEADS[method])
        self.options = LearningOptions(
            folder=str(folder), min_examples=80, min_sessions=6, epochs=10, learning_rate=1e-2
        )
        self.draft = DraftPool.model_validate(
            {
                "method": method,
                "model": str(self.head),
                "learning": self.options.model_dump(),
                "states": {"project": project},
            }
        )
        layout = states_format(self.draft, TARGET)
        assert layout is not None
        self.layout = layout
        opened = partial(ExampleStore.of, self.options)
        self.recorder = StateRecorder(opened, states_kind(self.draft, TARGET), layout.row_bytes)
        self.writer = ExampleWriter(opened, FINGERPRINT)
        self.method: DraftingMethod | None = None

    def reading(self) -> StateReading:
        return StateReading(self._runner, self._create, state_bounds(self.draft, TARGET), self.layout)

    def _runner(self, pages: int) -> ModelRunner:
        spec = capture_spec(self.draft, TARGET, "float32")
        assert spec is not None
        capture = StateCapture(spec, pages, PAGE_SIZE, CPU, spec.projection_on(CPU))
        return ModelRunner(load_model(TARGET, "float32", CPU), pages, PAGE_SIZE, capture=capture)

    def _create(self) -> DraftingMethod:
        tokens = {token: str(token) for token in range(VOCABULARY)}
        setup = DraftSetup("float32", CONTEXT, 4, tokens, str(TARGET), self.layout, recorder=self.recorder)
        self.method = create_method(self.draft, setup)
        return self.method

    def cluster(self) -> AbstractAsyncContextManager[Cluster]:
        return cluster(
            logits=torch.zeros(VOCABULARY, 1),
            context=CONTEXT,
            lock_step=True,
            reading=self.reading(),
            examples=self.writer.offer,
        )

    def trainer(self) -> Trainer:
        head = head_learning(self.draft, str(TARGET))
        return Trainer(self.options, Draft(self.head, self.draft.method, FINGERPRINT, 4, head=head), [])

    def end(self) -> None:
        self.writer.close()
        self.recorder.end()


def asked(c: Cluster, prompt: tuple[int, ...], learns: bool) -> Generation:
    source = Source() if learns else None
    return c.generation(
        prompt=prompt,
        max_len=len(prompt) + TOKENS,
        sampling=Sampling(temperature=0.0),
        draft_tokens=4,
        learn_from=source,
    )


async def served(c: Cluster, texts: Sequence[tuple[int, ...]], learns: bool = True) -> list[list[int]]:
    found: list[list[int]] = []
    # Twice as many fit into the drafter, so those that have just ended there do not make it refuse others.
    for first in range(0, len(texts), 8):
        group = [c.tokens(asked(c, prompt, learns)) for prompt in texts[first : first + 8]]
        found += await asyncio.gather(*group)
    return found


@pytest.mark.parametrize(
    ("method", "project"),
    [("eagle", "target"), ("eagle", "drafter"), ("medusa", "auto"), ("mlp_speculator", "auto")],
)
async def test_a_head_learns_from_traffic_and_takes_over_while_sessions_run(
    method: str, project: str, tmp_path: Path
) -> None:
    world = World(tmp_path, method, project)
    versions = VersionFolder(tmp_path)
    shown = prompts(8, seed=9)
    async with world.cluster() as c:
        c.hurry()
        before = await served(c, shown, learns=False)
        await served(c, prompts(PROMPTS, seed=1))
        world.end()
        store = ExampleStore.of(world.options)
        assert store.size(kind=states_kind(world.draft, TARGET)).examples > world.options.min_examples
        made = await asyncio.to_thread(world.trainer().look)
        assert made is not None
        assert made.recent is not None
        assert made.state is State.CANDIDATE, made.reason
        assert made.recent.after.agreement > 3 * made.recent.before.agreement
        assert versions.current() == made.version == 1
        (drafter,) = c.drafters.values()
        assert isinstance(world.method, ExchangesWeights)
        learned = LearnedDraft(versions, Version(0, world.head), FINGERPRINT, fingerprint_of(world.head))
        reload = DraftReload(learned, world.method, drafter)
        c.pace.step_s = 0.02
        streams = [asyncio.create_task(c.tokens(asked(c, prompt, learns=False))) for prompt in shown]
        await asyncio.sleep(0.2)
        await reload.check()
        assert reload.version == 1
        assert not any(stream.done() for stream in streams)
        assert await asyncio.gather(*streams) == before
        accepted = c.accepted
        assert await served(c, shown, learns=False) == before
        learned_accepts = c.accepted - accepted
        versions.rollback()
        await reload.check()
        assert reload.version == 0
        accepted = c.accepted
        assert await served(c, shown, learns=False) == before
        assert learned_accepts > 2 * (c.accepted - accepted)
        reload.close()
    store.forget()
    assert not any(store.states_of(f"session-{index}") for index in range(PROMPTS + 40))
    store.close()


async def test_states_of_sessions_that_may_not_learn_never_reach_the_disk(tmp_path: Path) -> None:
    world = World(tmp_path, "eagle")
    async with world.cluster() as c:
        c.hurry()
        await served(c, prompts(4, seed=1), learns=False)
        await served(c, prompts(3, seed=2), learns=True)
        await eventually(lambda: world.recorder.counts["kept"] == 3, "the states are written")
    world.end()
    store = ExampleStore.of(world.options)
    assert [index for index in range(8) if store.states_of(f"session-{index}")] == [4, 5, 6]
    assert {example.session for example in store.read(FINGERPRINT)} == {"session-4", "session-5", "session-6"}
    store.close()
