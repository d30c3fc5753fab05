"""What a router answers once its time to finish requests is over."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import DrainingError
from serve_app.http.failures import failure_of


class RefuseWhenStopped:
    """Answers every path with 503, until Serve stops the process."""

    def __init__(self, app: ASGIApp, has_stopped: Callable[[], bool]) -> None:
        self._app = app
        self._has_stopped = has_stopped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._has_stopped():
            refusal = failure_of(DrainingError("this server is stopping; try again later"))
            await refusal.response(scope, receive, send)
        else:
            await self._app(scope, receive, send)
