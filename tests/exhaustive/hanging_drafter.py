"""Application with drafters that hang on request."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

import serve_app.app
from cluster.drafting.requests import Proposal
from protos.messages import DraftRequest, Open, Shape
from serve_app.deployments import DraftDeployment


class HangingMethod:
    """Drafting method whose first pass never ends."""

    shapes = frozenset(Shape)

    def open(self, request: Open) -> None: ...

    def committed(self, session: str, tokens: tuple[int, ...]) -> None: ...

    def close(self, sessions: Sequence[str]) -> None: ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    def draft_ahead(self, *_: object) -> list[Proposal]:
        return self.draft(())


class HangingDrafter(DraftDeployment):
    """Real drafter until a test makes it hang."""

    def hang(self, name: str) -> None:
        """Makes the named drafter hang: it still answers calls but no longer drafts."""
        if self._drafter.peer_id == name:
            self._drafter._method = HangingMethod()


def build(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application; runs in a separate process."""
    serve_app.app.DraftDeployment = HangingDrafter  # type: ignore[misc]
    return serve_app.app.build(args)
