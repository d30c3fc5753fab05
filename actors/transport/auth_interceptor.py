"""Access control for a server's streams. A refused caller receives a status and nothing else.

Roles belong to streams, and frames of a stream hold only the kinds of message that its callers may send. So a role is
enforced for each kind of message too.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from actors.transport.credentials import Credentials
from actors.transport.handshakes import Handshakes
from cluster.trust.refusals import Refusals
from cluster.trust.roles import PeerRole

Context = grpc.aio.ServicerContext[Any, Any]


class Gate(grpc.aio.ServerInterceptor):
    """Interceptor of one server."""

    def __init__(self, credentials: Credentials, refusals: Refusals, max_streams_per_host: int) -> None:
        self.refusals = refusals
        self.handshakes = Handshakes(refusals)
        self._credentials = credentials
        self._max_streams_per_host = max_streams_per_host
        self.streams: Counter[str] = Counter()  # open streams by host
        self._turning_away: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._turn_away)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Checks calls of every service, gRPC's own included, so a stranger cannot even list the services."""
        self.handshakes.called()
        if self._credentials.belongs(details.invocation_metadata):
            return await continuation(details)
        return self._turning_away

    async def _turn_away(self, _: Any, context: Context) -> None:
        self.refusals.note(host_of(context), "a caller without a valid token")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED)

    @asynccontextmanager
    async def stream(self, context: Context, role: PeerRole) -> AsyncIterator[None]:
        """Admits a caller of this role for the duration of a stream; aborts the call if it may not open one."""
        host = host_of(context)
        held = self._credentials.roles(context.auth_context())
        if role not in held:
            names = ", ".join(sorted(one.value for one in held)) or "nobody"
            self.refusals.note(host, f"a caller that is no {role.value}", f"its certificate is that of {names}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED)
        if self.streams[host] >= self._max_streams_per_host:
            self.refusals.note(host, "one stream too many", f"{self.streams[host]} are open")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.streams[host] += 1
        try:
            yield
        finally:
            self.streams[host] -= 1
            if not self.streams[host]:
                del self.streams[host]


def host_of(context: Context) -> str:
    """Returns a caller's host, without the port, which differs between connections."""
    return context.peer().rpartition(":")[0]
