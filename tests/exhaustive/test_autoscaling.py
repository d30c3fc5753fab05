"""A real deployment's draft pool scales from zero with demand and back; every answer is exact."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from ray import serve

from tests.integration.serving import Reference, Served, demo_served
from tests.integration.test_serving import ask, ask_all, eventually

PROMPTS = tuple(f"Count from {first} to one hundred, one number a line." for first in range(1, 7))
TOKENS = 200
GROWN_S = 180  # limit for the pool to grow under load; drafters start slowly on a busy machine


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serves n-gram drafters, which start within seconds, in lock step, which always requests drafts."""
    replicas = "{min: 0, max: 3, up_delay_s: 1, down_delay_s: 10}"
    drafts = f"{{method: ngram, model: null, max_sessions: 4, replicas: {replicas}, resources: {{num_cpus: 0.1}}}}"
    with demo_served(f"draft={drafts}", "speculation.schedule=lock_step") as served:
        yield served


def replicas(served: Served, deployment: str) -> int:
    status = serve.status().applications[served.application].deployments[deployment]
    return status.replica_states.get("RUNNING", 0)


def test_draft_pool_follows_demand(served: Served) -> None:
    """Six sessions at two per drafter need three drafters; the number of targets stays at one."""
    reference = Reference(served.config.model.target)
    assert replicas(served, "Drafter") == 0
    reference.assert_greedy(PROMPTS[0], 8, ask(served, PROMPTS[0], 8))
    deadline = time.monotonic() + GROWN_S
    while replicas(served, "Drafter") < 3 and time.monotonic() < deadline:
        answers = asyncio.run(ask_all(served, PROMPTS, TOKENS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            reference.assert_greedy(prompt, TOKENS, answer)
    assert replicas(served, "Drafter") == 3
    assert replicas(served, "Target") == 1
    (target,) = served.inspect("Target")
    assert target["accepted_tokens"] > 0, "those that came were of use"
    eventually(lambda: replicas(served, "Drafter") == 0, "no drafter is left", seconds=120)
    reference.assert_greedy(PROMPTS[0], 8, ask(served, PROMPTS[0], 8))
