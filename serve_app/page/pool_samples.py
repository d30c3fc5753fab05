"""Collection of samples from all replicas that answer, through Ray Serve."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.page.samples import Sample

ANSWER_S = 2.0

log = logging.getLogger("ray.serve")


class PoolSamples:
    """Samples every replica of the pools at once; a pool that does not answer in time counts as empty."""

    def __init__(self, *pools: DeploymentHandle[Any]) -> None:
        self._pools = pools

    async def __call__(self) -> Sequence[Sample]:
        answers = await asyncio.gather(*map(_ask, self._pools))
        return [sample for samples in answers for sample in samples]


async def _ask(pool: DeploymentHandle[Any]) -> Sequence[Sample]:
    """Samples one pool; replicas that fail are left out."""
    try:
        answers = await pool.broadcast("sample").results_async(timeout_s=ANSWER_S, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        log.info("the live page shows nothing of %s: %s", pool.deployment_name, error)
        return []
    return [answer for answer in answers if isinstance(answer, Sample)]
