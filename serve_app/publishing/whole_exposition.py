"""The metrics of a whole deployment in one answer, whichever of its routers is asked."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # for other processes to say what they have: who is slower is left out of this answer

Gather = Callable[[], Awaitable[Sequence[Sequence[Metric]]]]
"""Asks all replicas of one deployment; each answers families that carry its name."""


class WholeExposition:
    """What Prometheus is told at `/metrics`."""

    def __init__(self, pools: Iterable[Gather]) -> None:
        self._pools = tuple(pools)

    async def __call__(self) -> bytes:
        answers = await asyncio.gather(*(_asked(pool) for pool in self._pools))
        return await asyncio.to_thread(exposition, [families for pool in answers for families in pool])


async def _asked(pool: Gather) -> Sequence[Sequence[Metric]]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await pool()
    except Exception as error:  # noqa: BLE001  # whatever befell others, the rest of the metrics is told
        log.warning("some replicas did not say what they have counted: %s", error or type(error).__name__)
        return ()


def exposition(replicas: Iterable[Iterable[Metric]]) -> bytes:
    """In Prometheus' text format, where all samples of a family stand together, whoever has them."""
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
