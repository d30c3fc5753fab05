"""Application whose routers identify themselves in each answer, to match broken answers to killed routers."""

import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import serve_app.app
from serve_app.deployments import RouterDeployment

ROUTER = "x-router-pid"


class Named:
    """Adds the process id to each answer of an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ROUTER] = str(os.getpid())
            await send(message)

        await self._app(scope, receive, named)


class ReportingRouter(RouterDeployment):  # type: ignore[misc]  # Serve's decorator has no type
    """Real router that adds its process id to every answer."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        app: FastAPI = super().__serve_build_asgi_app__()
        app.add_middleware(Named)
        return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application; runs in a separate process."""
    serve_app.app.RouterDeployment = ReportingRouter  # type: ignore[misc]
    return serve_app.app.build(args)
