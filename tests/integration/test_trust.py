"""Access control over real gRPC: unauthorized peers are refused, logged once, and learn nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from actors.net import auth_interceptor, streams
from actors.net.credentials import AUTHORIZATION, credentials_of
from cluster.config_sections import TrustConfig
from cluster.trust import PeerRole
from protos.codec import decode, encode
from protos.messages import Hello, Welcome
from protos.speculation_pb2_grpc import TargetServiceStub
from tests.certificates import Authority
from tests.integration.harness import IDENTITY, Cluster, cluster, eventually, plain_greedy
from tests.integration.stream_methods import (
    DRIVE_TARGET,
    STREAM_METHODS,
    VERIFY,
    StreamMethod,
    reveals_only,
    stream_to,
    within,
)

HELLO = Hello("stranger", IDENTITY.vocabulary, IDENTITY.target_model)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def shown(c: Cluster, method: StreamMethod, folder: Path) -> AsyncIterator[Any]:
    """Opens a stream with the certificates in this folder."""
    credentials = credentials_of(TrustConfig(certificates=str(folder)), PeerRole.ROUTER)
    async with credentials.dial(method.address(c), method.server) as channel:
        yield method.stub(channel)


async def is_accepted(stream: Any, method: StreamMethod) -> bool:
    await stream.write(encode(method.frame, [HELLO]))
    return isinstance(decode(await within(5, stream.read())).messages[0], Welcome)


def refusals(c: Cluster, method: StreamMethod) -> dict[str, int]:
    served = {**c.targets, **c.drafters}[method.address(c)]
    return dict(served.scheduler.refusals.counts)


# ---------------------------------------------------------------- authenticated peers


def with_token(folder: Path) -> TrustConfig:
    (folder / "token").write_text("secret")
    return TrustConfig(token_file=str(folder / "token"))


@pytest.mark.parametrize("trust_in", [Authority().issue_all, with_token], ids=["certificates", "token"])
async def test_drafts_are_accepted_between_authenticated_peers(trust_in, tmp_path):
    async with cluster(trust=trust_in(tmp_path), lock_step=True) as c:
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40)
        assert c.accepted > 0


# ---------------------------------------------------------------- certificates


@STREAM_METHODS
@pytest.mark.parametrize("kind", ["none", "plain", "expired", "foreign"])
async def test_callers_without_a_valid_certificate_fail_the_handshake(method, kind, tmp_path):
    authority = Authority()
    async with cluster(trust=authority.issue_all(tmp_path)) as c:
        issue_invalid(kind, tmp_path, authority, method.caller)
        async with channel_of(c, method, kind, tmp_path, authority) as channel:
            for _ in range(2):
                with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                    await is_accepted(method.stub(channel), method)
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40), "those who belong are served as before"


@pytest.mark.parametrize(("kind", "connections"), [("none", 3), ("expired", 3), ("foreign", 3), ("plain", 1)])
async def test_failed_handshakes_are_counted_and_logged_once(kind, connections, tmp_path, monkeypatch, caplog):
    """Channels without TLS share a failed connection."""
    authority = Authority()
    async with cluster(trust=authority.issue_all(tmp_path)) as c:
        issue_invalid(kind, tmp_path, authority, VERIFY.caller)
        (target,) = c.targets.values()
        await eventually(lambda: target._streams == 1, "the router is in")
        c.servers[VERIFY.address(c)].interceptor.handshakes._check_one()  # the router's connection
        monkeypatch.setattr(auth_interceptor, "HANDSHAKE_TIMEOUT_S", 0)  # all later callers are unauthorized
        for _ in range(3):
            async with channel_of(c, VERIFY, kind, tmp_path, authority) as channel:
                with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                    await is_accepted(VERIFY.stub(channel), VERIFY)
        await eventually(
            lambda: target.scheduler.refusals.counts[auth_interceptor.NO_HANDSHAKE] >= connections, "all are counted"
        )
        assert len([record for record in caplog.records if auth_interceptor.NO_HANDSHAKE in record.getMessage()]) == 1


async def test_successful_handshakes_are_not_counted_as_failures(tmp_path):
    """The test runs the handshake checks as soon as all peers have made a call."""
    async with cluster(trust=Authority().issue_all(tmp_path)) as c:
        (target,) = c.targets.values()
        await eventually(lambda: target._streams == 1, "the router is in")
        for _ in range(3):
            async with shown(c, VERIFY, tmp_path / "drafter") as stream:
                assert await is_accepted(stream, VERIFY)
        looked_at = c.servers[VERIFY.address(c)].interceptor.handshakes
        assert looked_at._pending == 4
        for _ in range(4):
            looked_at._check_one()
        assert target.scheduler.refusals.counts == {}


def issue_invalid(kind: str, folder: Path, authority: Authority, role: PeerRole) -> None:
    """Writes an expired or foreign certificate for the role; other kinds need no files."""
    if kind == "expired":
        authority.issue(folder / kind, role, lasts=timedelta(days=-1))
    elif kind == "foreign":
        Authority().issue(folder / kind, role)
        (folder / kind / "ca.crt").write_bytes(authority.pem)  # the caller trusts the server, but not vice versa


@asynccontextmanager
async def channel_of(
    c: Cluster, method: StreamMethod, kind: str, folder: Path, authority: Authority
) -> AsyncIterator[grpc.aio.Channel]:
    if kind == "plain":
        async with grpc.aio.insecure_channel(method.address(c)) as channel:
            yield channel
    elif kind == "none":
        options = [("grpc.ssl_target_name_override", method.server.name_in_certificate)]
        trusted_root = grpc.ssl_channel_credentials(authority.pem)
        async with grpc.aio.secure_channel(method.address(c), trusted_root, options) as channel:
            yield channel
    else:
        credentials = credentials_of(TrustConfig(certificates=str(folder / kind)), PeerRole.ROUTER)
        async with credentials.dial(method.address(c), method.server) as channel:
            yield channel


@STREAM_METHODS
async def test_each_stream_admits_one_role(method, tmp_path, caplog):
    authority = Authority()
    others = [[role] for role in PeerRole if role is not method.caller]
    cause = f"wrong role, expected {method.caller.value}"
    async with cluster(trust=authority.issue_all(tmp_path)) as c:
        for roles in [*others, []]:
            authority.issue(tmp_path / "other", *roles)
            for _ in range(3):
                async with shown(c, method, tmp_path / "other") as stream:
                    with reveals_only(grpc.StatusCode.PERMISSION_DENIED):
                        await within(5, stream.read())
        assert refusals(c, method) == {cause: 9}
        assert len([record for record in caplog.records if cause in record.getMessage()]) == 1
        authority.issue(tmp_path / "other", *PeerRole)
        async with shown(c, method, tmp_path / "other") as stream:
            assert await is_accepted(stream, method), "one certificate may hold several roles"


async def test_a_refused_peer_is_logged_once(tmp_path, caplog):
    authority = Authority()
    async with cluster(trust=authority.issue_all(tmp_path)) as c:
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                async with shown(c, VERIFY, tmp_path / "router") as stream:
                    with reveals_only(grpc.StatusCode.PERMISSION_DENIED):
                        await within(5, stream.read())
        (line,) = [record.getMessage() for record in caplog.records if "wrong role" in record.getMessage()]
        assert "certificate has router" in line


@pytest.mark.parametrize("holder", ["router", "drafter"])
async def test_a_target_needs_a_targets_certificate(holder, tmp_path):
    """The dialer aborts the handshake before any message, because it sends credentials only to the expected role."""
    authority = Authority()
    trust = authority.issue_all(tmp_path)
    received: list[str] = []

    async def listen(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        received.append(context.peer())

    server = grpc.aio.server()
    handlers = {"Verify": grpc.stream_stream_rpc_method_handler(listen)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("slipstream.v1.TargetService", handlers)])
    impostor = credentials_of(TrustConfig(certificates=str(tmp_path / holder)), PeerRole.TARGET)
    port = impostor.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        drafting = credentials_of(trust, PeerRole.DRAFTER)
        async with drafting.dial(f"127.0.0.1:{port}", PeerRole.TARGET) as channel:
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await is_accepted(VERIFY.stub(channel), VERIFY)
        assert received == []
        async with drafting.dial(f"127.0.0.1:{port}", PeerRole(holder)) as channel:
            await within(5, VERIFY.stub(channel).read())
        assert len(received) == 1, "it is the name that made the difference"
    finally:
        await server.stop(0)


async def test_certificates_are_replaced_while_streams_run(tmp_path):
    """The test also replaces the authority, so no trust in the old one can remain."""
    old = tmp_path / "kept"
    authority = Authority()
    async with cluster(trust=authority.issue_all(tmp_path)) as c:
        authority.issue(old, PeerRole.ROUTER)
        running = asyncio.create_task(c.tokens(c.generation(max_len=203)))
        (target,) = c.targets.values()
        await eventually(lambda: c.accepted > 0, "a session is drafted for")
        Authority("newer").issue_all(tmp_path)
        async with shown(c, DRIVE_TARGET, tmp_path / "router") as stream:
            assert await is_accepted(stream, DRIVE_TARGET)
        async with shown(c, DRIVE_TARGET, old) as stream:
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await is_accepted(stream, DRIVE_TARGET)
        assert not running.done(), "the session ended before anything was replaced"
        before = target._streams
        for link in (*c.router._targets.values(), *c.router._drafters.values()):
            link._outbox._overflow.set()  # breaks the stream
        await eventually(lambda: target._streams > before, "the router has come again")
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), 200)
        assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40)


async def test_certificates_rotate_under_load_without_a_failed_request(tmp_path, monkeypatch):
    """The test repeatedly rotates one authority's certificates, like cert-manager, and redials a stream each time."""
    monkeypatch.setattr(auth_interceptor, "HANDSHAKE_TIMEOUT_S", 300)  # drafters may disconnect at any time
    authority = Authority()
    async with cluster(targets=2, drafters=2, trust=authority.issue_all(tmp_path)) as c:
        c.pace.step_s = 0.005
        done = asyncio.Event()
        answered = 0

        async def ask() -> None:
            nonlocal answered
            while not done.is_set():
                assert await c.tokens(c.generation()) == plain_greedy((1, 2, 3), 40)
                answered += 1

        asking = asyncio.gather(*(ask() for _ in range(6)))
        served = {**c.targets, **c.drafters}
        links = {**c.router._targets, **c.router._drafters}
        for address, link in [*links.items()] * 2:
            came = served[address]._streams
            before = answered
            authority.issue_all(tmp_path)
            link._outbox._overflow.set()
            await eventually(lambda s=served[address], n=came: s._streams > n, "the router has come again")  # type: ignore[misc]
            while answered <= before + 6:  # so that no session loses several targets
                await asyncio.sleep(0.01)
        done.set()
        await asking
        assert [one.scheduler.refusals.counts for one in served.values()] == [{}] * len(served)


# ---------------------------------------------------------------- tokens

WRONG = {"none": (), "wrong": ((AUTHORIZATION, "Bearer secre"),), "bare": ((AUTHORIZATION, "secret"),)}


@STREAM_METHODS
@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG)
async def test_callers_without_the_token_learn_nothing(method, metadata, tmp_path, caplog):
    (tmp_path / "token").write_text("secret")
    async with cluster(trust=TrustConfig(token_file=str(tmp_path / "token"), reflection=True)) as c:
        with caplog.at_level(logging.WARNING):
            async with grpc.aio.insecure_channel(method.address(c)) as channel:
                for path in (method.path, REFLECTION, "/no.such.Service/Call"):
                    call = channel.stream_stream(path)(metadata=metadata)
                    with reveals_only(grpc.StatusCode.UNAUTHENTICATED):
                        await within(5, call.read())
                with reveals_only(grpc.StatusCode.UNAUTHENTICATED):
                    await health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), metadata=metadata, timeout=5
                    )
        assert refusals(c, method) == {"missing or wrong token": 4}
        assert len([record for record in caplog.records if "wrong token" in record.getMessage()]) == 1


async def test_a_refused_router_logs_once_and_connects_with_the_right_token(tmp_path, caplog):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "another").write_text("wrong")
    trust = TrustConfig(token_file=str(tmp_path / "token"))
    async with cluster(trust=trust) as c:
        credentials = credentials_of(TrustConfig(token_file=str(tmp_path / "another")), PeerRole.ROUTER)
        with caplog.at_level(logging.ERROR):
            link = streams.Link(
                DRIVE_TARGET.address(c),
                PeerRole.TARGET,
                credentials,
                call=lambda channel, metadata: TargetServiceStub(channel).Drive(metadata=metadata),
                frame_type=DRIVE_TARGET.frame,
                hello=lambda: HELLO,
                on_up=lambda: None,
                on_frame=lambda _: None,
                on_down=lambda: None,
            )
            await eventually(lambda: refusals(c, DRIVE_TARGET).get("missing or wrong token", 0) > 2, "it tries")
            assert link.refused == "UNAUTHENTICATED"
            (tmp_path / "another").write_text("secret")
            await eventually(lambda: link.is_up, "it is let in")
            assert link.refused is None
        await link.close()
        assert len([record for record in caplog.records if "refuses the connection" in record.getMessage()]) == 1


# ---------------------------------------------------------------- limits and reflection


async def test_reflection_is_served_only_if_configured():
    for asked, code in ((False, grpc.StatusCode.UNIMPLEMENTED), (True, grpc.StatusCode.OK)):
        async with cluster(trust=TrustConfig(reflection=asked)) as c, grpc.aio.insecure_channel(*c.targets) as channel:
            call = channel.stream_stream(REFLECTION)()
            await call.done_writing()
            assert await within(5, call.code()) is code


async def test_streams_per_host_are_limited_and_released(caplog):
    """The router holds one stream; drafters connect once a session exists."""
    async with cluster(trust=TrustConfig(max_streams_per_host=3)) as c:
        streams_of = c.servers[VERIFY.address(c)].interceptor.streams
        async with stream_to(c, VERIFY) as one, stream_to(c, VERIFY):
            assert await is_accepted(one, VERIFY)
            await eventually(lambda: streams_of.total() == 3, "one that has not greeted counts too")
            async with stream_to(c, VERIFY) as three:
                with reveals_only(grpc.StatusCode.RESOURCE_EXHAUSTED):
                    await is_accepted(three, VERIFY)
        assert refusals(c, VERIFY) == {"stream limit reached": 1}
        await eventually(lambda: streams_of.total() == 1, "only the router's is left")
        async with stream_to(c, VERIFY) as again:
            assert await is_accepted(again, VERIFY)


@STREAM_METHODS
async def test_a_caller_without_a_hello_times_out(method, monkeypatch):
    monkeypatch.setattr(streams, "HELLO_S", 0.2)
    async with cluster() as c, stream_to(c, method) as stream:
        with reveals_only(grpc.StatusCode.DEADLINE_EXCEEDED):
            await within(5, stream.read())
