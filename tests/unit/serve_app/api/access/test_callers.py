"""Tests API keys and their limits."""

import hashlib
import hmac
from unittest.mock import patch

import pytest

from cluster.config_sections import ApiKey
from cluster.errors import CapacityError, ConfigError, RequestError
from serve_app.api.access import Caller, Callers
from serve_app.api.request_schemas import CompletionRequest
from serve_app.cli.main import key_lines, new_key
from tests.asgi_front import config_of


def key(shown: str, **bounds: object) -> ApiKey:
    return ApiKey.model_validate({"sha256": hashlib.sha256(shown.encode()).hexdigest(), **bounds})


KEYS = {"ann": key("sk-ann", max_sessions=3), "bob": key("sk-bob")}


@pytest.mark.parametrize(("shown", "name"), [("sk-ann", "ann"), ("sk-bob", "bob"), ("sk-", None), ("", None)])
def test_callers_are_identified_by_key(shown: str, name: str | None) -> None:
    found = Callers.of(KEYS).find(shown)
    assert (found.name if found else None) == name


def test_every_digest_is_compared_in_constant_time() -> None:
    with patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compare:
        Callers.of(KEYS).find("sk-ann")
    assert compare.call_count == len(KEYS)


def test_keys_share_prefixes_only_with_a_common_salt() -> None:
    keys = KEYS | {"eve": key("sk-eve", cache_salt="team"), "fay": key("sk-fay", cache_salt="team")}
    salts = {caller.name: caller.cache_salt for caller in Callers.of(keys).by_digest.values()}
    assert len(set(salts.values())) == 3
    assert salts["eve"] == salts["fay"]
    assert Caller().cache_salt == ""


def test_a_configured_salt_cannot_equal_a_default_one() -> None:
    salts = {one.cache_salt for one in Callers.of({"a": key("x"), "b": key("y", cache_salt="a")}).by_digest.values()}
    assert len(salts) == 2


def test_sessions_in_flight_are_limited_and_released() -> None:
    caller = Caller("ann", max_sessions=3)
    with caller.exchange() as first:
        first.take(2)
        with caller.exchange() as second, pytest.raises(CapacityError, match="2 of 3"):
            second.take(2)
        with caller.exchange() as third:
            third.take(1)
    assert caller.sessions == 0


def test_a_request_over_the_session_limit_is_invalid() -> None:
    with Caller("ann", max_sessions=3).exchange() as exchange, pytest.raises(RequestError) as caught:
        exchange.take(4)
    assert (caught.value.field, caught.value.code) == ("n", "invalid_value")


def test_more_tokens_than_a_key_allows_are_refused() -> None:
    caller = Caller("ann", max_tokens=5)
    caller.check(CompletionRequest(model="m", prompt=("a",), max_tokens=5))
    with pytest.raises(RequestError) as caught:
        caller.check(CompletionRequest(model="m", prompt=("a",), max_tokens=6))
    assert (caught.value.field, caught.value.code) == ("max_tokens", "invalid_value")


def test_a_generated_key_matches_its_printed_configuration() -> None:
    made = new_key()
    digest = key_lines("ann", made).partition("sha256: ")[2].rstrip("}")
    assert Callers.of({"ann": ApiKey(sha256=digest)}).find(made) is not None
    assert made not in key_lines("ann", made)
    assert made != new_key()


@pytest.mark.parametrize("digest", ["", "0" * 63, "G" * 64, "A" * 64])
def test_invalid_digests_are_refused(digest: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.keys\.ann\.sha256"):
        config_of({"keys": {"ann": {"sha256": digest}}})
