"""Replicas that respond but do not compute are detected and replaced under load: a stopped rank, a hanging drafter.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray import serve

from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from tests.exhaustive.small_target import make_small_target
from tests.exhaustive.test_moves import GREEDY, MODEL, POOLS, TOKENS, Load, Request, draft, handovers, under_load
from tests.integration.serving import Reference, Served, built_by, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

PROMPTS = tuple(f"Explain to a child something about {topic}." for topic in ("rivers", "trains", "bread", "glass"))
REQUESTS: list[Request] = [(prompt, GREEDY) for prompt in PROMPTS]
REPLACED_S = 300  # models load slowly on a busy machine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))
    with built_by("tests.exhaustive.hanging_drafter:build"):
        where = (f"model.target={target}", f"model.served_name={MODEL}", "target.replicas={min: 2, max: 2}")
        with demo_served(*where, *POOLS[1:], draft(64).replace(", labels: {models: 'yes'}", "")) as served:
            yield served
            assert_nothing_left(served)


def disturbed(served: Served, what: str, disturb: Callable[[], None]) -> None:
    """Runs a failure under load; every text must equal the greedy answer."""
    before = handovers(served)
    load = Load()
    asyncio.run(under_load(served, load, disturb, REQUESTS))
    print(f"\n{what}: worst stall {load.worst_gap_s:.1f} s, handovers {dict(handovers(served) - before)}")
    assert not load.errors
    reference = Reference(served.config.model.target)
    for index, (prompt, _) in enumerate(REQUESTS):
        for text in load.texts[index]:
            reference.assert_greedy(prompt, TOKENS, text)


def until_replaced(served: Served, deployment: str, pid: int) -> None:
    began = time.monotonic()

    def is_gone() -> bool:
        return pid not in [one["pid"] for one in served.inspect(deployment)]

    def are_two_others() -> bool:
        pids = [one["pid"] for one in served.inspect(deployment)]
        return len(pids) == 2 and pid not in pids

    eventually(is_gone, "it is found", seconds=REPLACED_S)
    found_s = time.monotonic() - began
    eventually(are_two_others, "it is replaced", seconds=REPLACED_S)
    print(f"\n{deployment}: out of service after {found_s:.1f} s, replaced after {time.monotonic() - began:.1f} s")


def busiest(served: Served, deployment: str) -> dict[str, object]:
    """Waits for a replica with sessions; returns the one with the most."""
    eventually(lambda: any(one["sessions"] for one in served.inspect(deployment)), "it has sessions")
    return max(served.inspect(deployment), key=lambda one: one["sessions"])


def test_a_rank_that_is_stopped(served: Served) -> None:
    def stop() -> None:
        target = busiest(served, "Target")
        (rank,) = target["rank_pids"]  # type: ignore[misc]
        os.kill(rank, signal.SIGSTOP)
        until_replaced(served, "Target", int(str(target["pid"])))
        eventually(lambda: not os.path.exists(f"/proc/{rank}"), "nothing of it is left", seconds=60)

    disturbed(served, "a rank that is stopped", stop)


def test_a_drafter_whose_forward_hangs(served: Served) -> None:
    def hang() -> None:
        drafter = busiest(served, "Drafter")
        handle = serve.get_deployment_handle("Drafter", APPLICATION)
        handle.broadcast("hang", drafter["name"]).results(timeout_s=20)
        until_replaced(served, "Drafter", int(str(drafter["pid"])))

    disturbed(served, "a drafter whose forward hangs", hang)
