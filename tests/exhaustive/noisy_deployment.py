"""Application in which the first drafter of the pool turns to noise."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

import serve_app.app
from cluster.config import SlipstreamConfig
from serve_app.deployments import DraftDeployment
from tests.exhaustive.noisy_drafter import AfterTokens, BecomingNoisyMethod

MARK = "SLIPSTREAM_TEST_NOISY_DRAFTER"  # path of a file; the drafter that creates it becomes noisy
GOOD_TOKENS = 200
VOCABULARY = 49_152


def is_first(mark: Path, name: str) -> bool:
    """Returns whether no other process has created the file."""
    try:
        with mark.open("x") as file:
            file.write(name)
    except FileExistsError:
        return False
    return True


class OneIsNoisy(DraftDeployment):
    """Drafter that turns to noise if it is the first of its pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[SlipstreamConfig], targets: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        await super().__init__(models, targets)  # type: ignore[misc]
        if is_first(Path(os.environ[MARK]), self._server.address):
            self._drafter._method = BecomingNoisyMethod(self._drafter._method, AfterTokens(GOOD_TOKENS), VOCABULARY)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application; runs in a separate process."""
    serve_app.app.DraftDeployment = OneIsNoisy  # type: ignore[misc]
    return serve_app.app.build(args)
