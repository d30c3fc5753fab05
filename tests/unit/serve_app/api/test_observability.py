"""Tests counters by prompt version, and request logs, which contain no text."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve._private.logging_utils import ServeFormatter

from cluster.errors import RequestError
from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Finish
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.formats import ApiFormat, ChatFormat, CompletionFormat, ResponsesFormat
from serve_app.api.metrics import Metrics
from serve_app.api.observability import OPERATIONS, OTHER_VERSION, PromptVersions, RequestRecord, logged
from serve_app.api.replies import FinishReason
from serve_app.api.request_schemas import ChatRequest, CompletionRequest, GenerationRequest
from serve_app.api.text import TextCodec
from serve_app.publishing.aggregate_metrics import exposition
from serve_app.startup import log_under_serve
from serve_app.status import versions_table
from tests.asgi_front import http_client, toy_api
from tests.scripted_generator import Script, ScriptedGenerator

SECRET = "Rosebud"
ANSWER = "sled"


@dataclass
class Choice:
    tokens: int = 10
    accepted: int = 3
    rejected: int = 1
    finish: FinishReason | None = "stop"
    first_token_s: float | None = 0.5
    last_token_s: float | None = 0.5


def record(version: str | None) -> RequestRecord:
    metadata = {} if version is None else {"metadata": {"prompt_version": version}}
    body = {"model": "toy", "messages": [{"role": "user", "content": SECRET}], **metadata}
    request = parse(ChatRequest, json.dumps(body).encode(), RequestBounds())
    return RequestRecord(200, request=request, response_id="r1", prompt_tokens=5, choices=[Choice()], sessions=["s1"])


def sample(versions: PromptVersions, name: str, **labels: str) -> float | None:
    found = [one for family in versions.collect() for one in family.samples]
    return next((one.value for one in found if one.name == name and one.labels.items() >= labels.items()), None)


# ------------------------------------------------------------ prompt versions


def test_requests_are_summed_by_prompt_version() -> None:
    versions = PromptVersions()
    versions.ended(record("v1"), 2.0)
    versions.ended(record("v1"), 4.0)
    versions.ended(record("v2"), 1.0)
    versions.ended(record(None), 1.0)
    prefix = "slipstream_prompt_version"
    assert sample(versions, f"{prefix}_requests_total", prompt_version="v1") == 2
    assert sample(versions, f"{prefix}_tokens_total", prompt_version="v1", kind="drafted") == 8
    assert sample(versions, f"{prefix}_tokens_total", prompt_version="v1", kind="accepted") == 6
    assert sample(versions, f"{prefix}_seconds_total", prompt_version="v1", until="end") == 6.0
    assert sample(versions, f"{prefix}_seconds_total", prompt_version="v2", until="first token") == 0.5


def test_versions_beyond_the_limit_are_counted_together() -> None:
    versions = PromptVersions(most=2)
    for name in ("a", "b", "c", "d", "a"):
        versions.ended(record(name), 1.0)
    family = "slipstream_prompt_version_requests_total"
    counts = {name: sample(versions, family, prompt_version=name) for name in ("a", "b", "c", OTHER_VERSION)}
    assert counts == {"a": 2, "b": 1, "c": None, OTHER_VERSION: 2}


@pytest.mark.parametrize("version", ["", "v" * 65, "two words", "v1\n", '"', "vé", "v٣"])
def test_an_invalid_version_label_is_refused(version: str) -> None:
    with pytest.raises(RequestError, match=r"metadata: prompt_version must be"):
        record(version)


def test_status_shows_versions_of_all_routers() -> None:
    metrics = [Metrics(clock=iter((0.0, 2.0)).__next__) for _ in range(2)]
    for one in metrics:
        with one.request("chat") as running:
            vars(running).update(vars(record("v1")))
    table = versions_table(exposition([one.families() for one in metrics]).decode())
    cells = [cell for column in table.columns for cell in column.cells]
    assert cells == ["v1", "2", "0.75", "0.500", "2.000", "10 + 20"]
    assert versions_table(Metrics().exposition().decode()) is None


# ------------------------------------------------------------ logs


def test_a_log_line_reports_how_a_request_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), logged("chat", record("v1"), iter((1.0, 3.5)).__next__):
        assert not caplog.records
    (line,) = caplog.records
    fields = vars(line)
    assert (fields["request"], fields["sessions"], fields["seconds"], fields["status"]) == ("r1", "s1", 2.5, 200)
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["prompt_version"]) == (5, 10, "v1")


def test_text_log_lines_contain_all_structured_fields(caplog: pytest.LogCaptureFixture) -> None:
    ended = record("v1")
    ended.sessions = ["s1", "s2"]
    with caplog.at_level(logging.INFO), logged("chat", ended, iter((1.0, 3.5)).__next__):
        pass
    (line,) = caplog.records
    assert (
        ServeFormatter("replica", "Router")
        .format(line)
        .endswith(
            "request ended: request=r1 endpoint=chat status=200 seconds=2.5 prompt_tokens=5 completion_tokens=10"
            " accepted_tokens=3 rejected_tokens=1 sessions=s1,s2 prompt_version=v1"
        )
    )


@contextmanager
def attached(name: str) -> Iterator[list[logging.LogRecord]]:
    """Yields the records that a logger's handlers receive."""
    records: list[logging.LogRecord] = []

    class RecordingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = RecordingHandler()
    logging.getLogger(name).addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger(name).removeHandler(handler)


def test_loggers_are_attached_to_serves() -> None:
    before = logging.getLogger("a_package")
    inner = logging.getLogger("a_package.module")
    logging.getLogger("a_parent").setLevel(logging.INFO)
    log_under_serve(["a_package"], "a_parent")
    with attached("a_parent") as records:
        inner.info("told")
        inner.debug("not told")
    assert [record.getMessage() for record in records] == ["told"]
    assert before.parent is logging.getLogger("a_parent")


def scripts() -> dict[str, Script]:
    said = CommittedTokens(tuple(ANSWER.encode()), 2, 3)
    return {
        "answered": [said, Ended(Finish.STOP)],
        "refused": [RequestError(f"no room for {len(SECRET)} tokens")],
        "broken": [said, ValueError(f"cannot go on after {SECRET} and {ANSWER}")],
    }


@pytest.mark.parametrize("what", list(scripts()))
@pytest.mark.parametrize("more", [{}, {"max_tokens": -1}, {"temperature": SECRET}, {"stop": [SECRET], "stream": True}])
async def test_no_log_contains_a_prompt_or_an_answer(
    codec: TextCodec, what: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    api = toy_api(ScriptedGenerator(scripts()[what]), codec)
    body = {"model": "toy", "messages": [{"role": "user", "content": SECRET}], **more}
    with caplog.at_level(logging.DEBUG):
        async with http_client(api) as client:
            await client.post("/v1/chat/completions", json=body)
    assert caplog.records, "each request has a line"
    formatter = logging.Formatter()
    for line in caplog.records:
        told = formatter.format(line) + repr(vars(line))
        assert SECRET not in told
        assert ANSWER not in told


def test_a_refused_request_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), logged("chat", RequestRecord(400, name="n1")):
        pass
    assert [vars(line)["request"] for line in caplog.records] == ["n1"]


# ------------------------------------------------------------ spans


@pytest.mark.parametrize("dialect", [ChatFormat, CompletionFormat, ResponsesFormat])
def test_every_endpoint_has_an_opentelemetry_operation(dialect: type[ApiFormat[Any]]) -> None:
    assert OPERATIONS[dialect.endpoint] in ("chat", "text_completion")


# ------------------------------------------------------------ metadata


def with_metadata(schema: type[ChatRequest] | type[CompletionRequest], metadata: Any) -> GenerationRequest:
    prompt = {"prompt": "hi"} if schema is CompletionRequest else {"messages": [{"role": "user", "content": "hi"}]}
    return parse(schema, json.dumps({"model": "toy", "metadata": metadata, **prompt}).encode(), RequestBounds())


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_only_the_prompt_version_of_metadata_is_used(
    schema: type[ChatRequest] | type[CompletionRequest],
) -> None:
    for metadata in (None, {}, {"prompt": "v7"}):
        assert with_metadata(schema, metadata).prompt_version is None
    assert with_metadata(schema, {"prompt_version": "v7", "other": "x" * 500}).prompt_version == "v7"
    for wrong in ({"prompt": 7}, {"prompt_version": 7}, {str(index): "" for index in range(17)}):
        with pytest.raises(RequestError, match="metadata"):
            with_metadata(schema, wrong)


def test_responses_requests_have_a_prompt_version() -> None:
    asked = {"model": "toy", "input": "hi", "metadata": {"prompt_version": "v7"}}
    chat = ResponsesFormat().parse(json.dumps(asked).encode(), RequestBounds())
    assert chat.prompt_version == "v7"
