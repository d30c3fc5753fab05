"""Access control for a server's streams. A refused caller receives only a status code.

Each stream is for one role. Its frames can hold only messages that this role may send, so checking the role of a stream
also restricts its messages.

`Handshakes` counts callers that fail the TLS handshake. gRPC reports the start of a handshake, but neither its end nor
its caller. A handshake counts as failed if no call follows it within a timeout.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from actors.net.credentials import Credentials
from cluster.trust import PeerRole, Refusals

HANDSHAKE_TIMEOUT_S = 10.0  # equals the timeout for a caller's Hello
NO_HANDSHAKE = "failed TLS handshake"


class Handshakes:
    """Counts failed handshakes of one server; must be created on the server's event loop."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._pending = 0  # pending handshakes: started within the timeout
        self._with_call = 0  # pending handshakes already followed by a call

    def on_handshake(self) -> None:
        """Records the start of a handshake; called in a gRPC thread, sometimes after the loop has closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add_pending)

    def on_call(self) -> None:
        """Records a call, which proves that one handshake succeeded. Peers rarely make more than one call per
        connection.
        """
        self._with_call = min(self._with_call + 1, self._pending)

    def _add_pending(self) -> None:
        self._pending += 1
        self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._check_one)

    def _check_one(self) -> None:
        self._pending -= 1
        if self._with_call:
            self._with_call -= 1
        else:
            self._refusals.note("unknown peer", NO_HANDSHAKE)


Context = grpc.aio.ServicerContext[Any, Any]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Checks all calls to one server and limits streams per host."""

    def __init__(self, credentials: Credentials, refusals: Refusals, max_streams_per_host: int) -> None:
        self.refusals = refusals
        self.handshakes = Handshakes(refusals)
        self._credentials = credentials
        self._max_streams_per_host = max_streams_per_host
        self.streams: Counter[str] = Counter()  # open streams by host
        self._rejecting: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._reject)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Authenticates calls to every service, gRPC reflection included, so that a stranger cannot even list the
        services.
        """
        self.handshakes.on_call()
        if self._credentials.belongs(details.invocation_metadata):
            return await continuation(details)
        return self._rejecting

    async def _reject(self, _: Any, context: Context) -> None:
        self.refusals.note(host_of(context), "missing or wrong token")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED)

    @asynccontextmanager
    async def stream(self, context: Context, role: PeerRole) -> AsyncIterator[None]:
        """Admits a caller of this role for the duration of a stream; aborts the call of any other caller."""
        host = host_of(context)
        roles = self._credentials.roles(context.auth_context())
        if role not in roles:
            names = ", ".join(sorted(one.value for one in roles)) or "none"
            self.refusals.note(host, f"wrong role, expected {role.value}", f"certificate has {names}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED)
        if self.streams[host] >= self._max_streams_per_host:
            self.refusals.note(host, "stream limit reached", f"{self.streams[host]} are open")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.streams[host] += 1
        try:
            yield
        finally:
            self.streams[host] -= 1
            if not self.streams[host]:
                del self.streams[host]


def host_of(context: Context) -> str:
    """Returns a caller's host without the port, which differs between connections."""
    return context.peer().rpartition(":")[0]
