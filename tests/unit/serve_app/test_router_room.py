"""Tests a router's session limit, its refusals, and its log about peers."""

import asyncio
import logging
from unittest.mock import patch

import pytest

from cluster.audit import Audits
from cluster.config import AuditConfig
from cluster.errors import CapacityError, DrainingError
from cluster.routing.membership import Members
from cluster.routing.session_router import SessionRouter
from protos.codec import Decoded, Malformed
from protos.messages import Identity, Refusal, RefusalReason
from serve_app.router import Router, RouterLimits
from tests.session_events import events_of
from tests.static_membership import StaticMembership
from tests.toys import a_generation


@pytest.fixture
def router() -> Router:
    audits = Audits(AuditConfig(), "float32", lambda _: None)
    limits = RouterLimits(max_sessions=4, target_wait_s=1.0)
    return Router(StaticMembership(Members((), ())), Identity("vocabulary", "model"), limits, audits)


def test_sessions_are_accepted_up_to_the_limit(router: Router) -> None:
    router.check_room(4)
    with pytest.raises(CapacityError, match="0 sessions are in flight and 5 more would exceed 4"):
        router.check_room(5)


def test_sessions_are_refused_while_every_target_is_full(router: Router) -> None:
    with (
        patch.object(SessionRouter, "are_targets_full", return_value=True),
        pytest.raises(CapacityError, match="target"),
    ):
        router.check_room(1)


async def test_sessions_are_refused_while_draining(router: Router) -> None:
    router.drain()
    with pytest.raises(DrainingError):
        router.check_room(1)


async def test_generation_is_refused_while_draining(router: Router) -> None:
    router.drain()
    with pytest.raises(DrainingError):
        await anext(events_of(router, None))  # type: ignore[arg-type]  # it is not looked at


@pytest.mark.parametrize("goes_on", [False, True])
async def test_sessions_that_outlast_the_drain_end_with_an_error(router: Router, goes_on: bool) -> None:
    running = asyncio.ensure_future(anext(events_of(router, a_generation())))
    await asyncio.sleep(0)
    router.end_after(0)
    if goes_on:
        router.cancel_end()
        await asyncio.sleep(0)
        assert not router.has_ended
        router.check_room(1)
        router.drain(within_s=0)
        router.cancel_end()  # too late; already draining
    with pytest.raises(DrainingError, match="before the answer was complete"):
        await asyncio.wait_for(running, 10)
    assert router.has_ended
    assert router.is_idle
    with pytest.raises(DrainingError):
        router.check_room(1)


def test_log_lines_name_the_session_in_text_and_as_a_field(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    refusal = Refusal("5f3c", 1, RefusalReason.OVERLOADED, "full")
    malformed = Malformed("Verdict", "91ab\n", 1, "no tokens")
    with caplog.at_level(logging.INFO, "serve_app.router"):
        router._receive("target:1", Decoded((refusal,), (malformed,)))
    logged = [(line.getMessage(), vars(line)["session"]) for line in caplog.records]
    assert logged == [
        ("target:1 refuses session '5f3c': full", "5f3c"),
        ("malformed Verdict from target:1 for session '91ab\\n': no tokens", "91ab\n"),
    ]
