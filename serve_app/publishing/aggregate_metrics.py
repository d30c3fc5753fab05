"""Metrics of a whole deployment in one response, from any of its routers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # time for other processes to answer; slower ones are left out

Gather = Callable[[], Awaitable[Sequence[Sequence[Metric]]]]
"""Collects the families of all replicas of one deployment; each replica labels its own."""


class WholeExposition:
    """Produces the response to Prometheus at `/metrics`."""

    def __init__(self, pools: Iterable[Gather]) -> None:
        self._pools = tuple(pools)

    async def __call__(self) -> bytes:
        answers = await asyncio.gather(*(_asked(pool) for pool in self._pools))
        return await asyncio.to_thread(exposition, [families for pool in answers for families in pool])


async def _asked(pool: Gather) -> Sequence[Sequence[Metric]]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await pool()
    except Exception as error:  # noqa: BLE001  # whatever failed elsewhere, the other metrics are published
        log.warning("some replicas did not say what they have counted: %s", error or type(error).__name__)
        return ()


def exposition(replicas: Iterable[Iterable[Metric]]) -> bytes:
    """Renders Prometheus' text format, which requires all samples of a family to be adjacent."""
    registry = CollectorRegistry()
    registry.register(_Merged(replicas))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, replicas: Iterable[Iterable[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for families in replicas:
            for family in families:
                known = self._families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                known.samples.extend(family.samples)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()
