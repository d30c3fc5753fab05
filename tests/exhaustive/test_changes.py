"""A configuration change replaces only the affected replicas, on real Ray under load.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.operations.deploying import deploy, serve_details
from serve_app.status import deployed_bounds
from tests.exhaustive.small_target import make_small_target
from tests.exhaustive.test_moves import MODEL, POOLS, Load, check, under_load
from tests.integration.serving import EXACT, Served, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

SETTLED_S = 5.0  # longer than Serve takes to start an update
PLAIN_SIZES = ("target.replicas={min: 2, max: 2}", "draft.replicas={min: 2, max: 2}")
DRAFTERS = ("draft.resources.num_cpus=0.1", "draft.resources.background=false", "draft.cache.gib=0.1")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    target = make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))
    placed = "target.resources_per_rank={num_cpus: 0.1}"
    return (f"model.target={target}", f"model.served_name={MODEL}", placed, *POOLS[1:], *DRAFTERS)


@pytest.fixture(scope="module")
def served(settings: tuple[str, ...]) -> Iterator[Served]:
    with demo_served(*settings, *PLAIN_SIZES) as served:
        yield served
        assert_nothing_left(served)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[str]:
    load = Load()
    asyncio.run(under_load(served, load, lambda: None))
    assert not load.errors
    return [next(iter(load.texts[index])) for index in range(len(load.texts))]


@pytest.fixture(scope="module")
def redeploy(served: Served, settings: tuple[str, ...]) -> Callable[..., None]:
    def with_changes(*changes: str) -> None:
        port = f"server.port={served.config.server.port}"
        deploy(demo_config([*EXACT, *settings, *PLAIN_SIZES, port, *changes]), APPLICATION)

    return with_changes


def processes(served: Served) -> dict[str, set[int]]:
    return {name: {one["pid"] for one in served.inspect(name)} for name in ("Target", "Drafter", "Router")}


def test_bounds_and_delays_replace_nobody(
    served: Served, undisturbed: list[str], redeploy: Callable[..., None]
) -> None:
    before = processes(served)
    bounds = {"Target": (1, 4), "Drafter": (1, 3)}

    def widen() -> None:
        redeploy(
            "target.replicas={min: 1, max: 4, down_delay_s: 1000}",
            "draft.replicas={min: 1, max: 3, up_delay_s: 1000, down_delay_s: 1001}",
        )
        time.sleep(SETTLED_S)
        assert deployed_bounds(serve_details()["applications"][APPLICATION]) == bounds
        scaling = [(one["scaling"]["Target"], one["scaling"]["Drafter"]) for one in served.inspect("Target")]
        assert {(own["down_delay_s"], drafts["down_delay_s"]) for own, drafts in scaling} == {(1000, 1001)}

    counted = check("other bounds and delays", served, undisturbed, widen)
    assert processes(served) == before
    assert not counted, "no session is moved"


def test_a_growing_pool_keeps_its_replicas(
    served: Served, undisturbed: list[str], redeploy: Callable[..., None]
) -> None:
    before = processes(served)

    def grow() -> None:
        redeploy("draft.replicas={min: 3, max: 3}")
        eventually(lambda: len(served.inspect("Drafter")) == 3, "there is a third drafter", seconds=300)

    check("a third drafter", served, undisturbed, grow)
    after = processes(served)
    assert after["Drafter"] > before["Drafter"]
    assert {**after, "Drafter": None} == {**before, "Drafter": None}

    def shrink() -> None:
        redeploy()
        eventually(lambda: len(served.inspect("Drafter")) == 2, "there are two drafters again", seconds=300)

    check("two drafters again", served, undisturbed, shrink)


def test_another_draft_model_replaces_drafters_alone(
    served: Served, undisturbed: list[str], redeploy: Callable[..., None], tmp_path: Path
) -> None:
    before = processes(served)
    draft_model = served.config.draft.model
    assert draft_model is not None
    other = shutil.copytree(draft_model, tmp_path / "draft")

    def change() -> None:
        redeploy(f"draft.model={other}")

        def are_others() -> bool:
            now = {one["pid"] for one in served.inspect("Drafter")}
            return len(now) == 2 and now.isdisjoint(before["Drafter"])

        eventually(are_others, "there are two other drafters", seconds=600)

    check("another draft model", served, undisturbed, change)
    after = processes(served)
    assert {**after, "Drafter": None} == {**before, "Drafter": None}
