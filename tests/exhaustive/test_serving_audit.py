"""Audits in a whole deployment: honest targets raise no alarm, and operators see the audits."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.status import audits_table
from tests.integration.serving import Served, demo_served

REQUESTS = 6


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "differences.jsonl"


@pytest.fixture(scope="module")
def served(records: Path) -> Iterator[Served]:
    pool = ("target.replicas={min: 2, max: 2}", "target.resources_per_rank.num_cpus=0.3")
    with demo_served(*pool, "server.audit.share=1.0", f"server.audit.records={records}") as served:
        yield served


def test_audits_confirm_everything_honest_targets_served(served: Served, records: Path) -> None:
    """Another replica verifies greedy and sampled answers; a rare near-tie in float32 is not a fault."""
    for index in range(REQUESTS):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
        served.client.completions.create(
            model="SmolLM2-135M-Instruct", prompt=f"Chapter {index}. It was", max_tokens=32, **sampling
        )
    deadline = time.monotonic() + 120
    audits: dict[str, int] = {}
    while sum(audits.values()) < REQUESTS and time.monotonic() < deadline:
        time.sleep(0.5)
        (router,) = served.inspect("Router")
        audits = router["audits"]
    assert audits["equal"] + audits["near_tie"] == REQUESTS, audits
    assert records.read_text() == ""
    health = httpx.get(f"{served.url}/health", trust_env=False).json()
    assert health == {"status": "ok", "models": {served.config.model.name: "ok"}, "audit": "ok"}
    shown = dict(zip(*(list(column.cells) for column in audits_table([router]).columns), strict=True))
    assert shown["differs"] == "0"
