"""The cost of certificates and tokens per round, between the loops of real processes over gRPC.

Not part of the default suite: `make test-exhaustive`. The toy models take no time, so a round is transport and
schedulers only. The arms are interleaved, and processor time is what counts.
"""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import geometric_mean, median

from cluster.config_sections import TrustConfig
from tests.certificates import Authority
from tests.integration.harness import Cluster, cluster, plain_greedy

TURNS = 30
TOKENS = 300
MAX_SLOWDOWN = 1.5  # times a round without


async def round_s(c: Cluster) -> float:
    """Processor time of one session alone, in lock step: every round has a block, a step and its verdict."""
    (target,) = c.targets.values()
    before = target.timeline.recording().events[-1].order if target.timeline.recording().events else -1
    began = time.process_time()
    assert await c.tokens(c.generation(max_len=3 + TOKENS)) == plain_greedy((1, 2, 3), TOKENS)
    took = time.process_time() - began
    steps = sum(e.name == "decided" and e.order > before for e in target.timeline.recording().events)
    return took / steps


async def test_the_cost_of_certificates_and_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    trusts = {
        "nothing": TrustConfig(),
        "certificates": Authority().issue_all(tmp_path / "certificates"),
        "a token": TrustConfig(token_file=str(tmp_path / "token")),
    }
    async with AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(cluster(lock_step=True, trust=trust))
            for name, trust in trusts.items()
        }
        for c in clusters.values():
            c.hurry()
            await round_s(c)
        found: dict[str, list[float]] = {name: [] for name in trusts}
        for turn in range(TURNS):
            names = list(trusts)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[name].append(await round_s(clusters[name]))
    for name, times in found.items():
        ratios = sorted(one / base for one, base in zip(times, found["nothing"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
        print(
            f"\n{name}: {1e3 * median(times):.3f} ms a round, {geometric_mean(ratios):.3f} times what it takes without"
            f" (middle half {low:.3f} to {high:.3f})"
        )
        assert geometric_mean(ratios) < MAX_SLOWDOWN
