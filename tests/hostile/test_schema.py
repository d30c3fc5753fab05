"""The server conforms to its `/openapi.json` for two thousand valid and invalid requests from schemathesis.

Not part of the default suite: `make test-hostile`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from jsonschema import Draft202012Validator

from tests.hostile.toy_server import MODEL, toy_server

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install '.[hostile]'")
rules = pytest.importorskip("schemathesis.specs.openapi.checks")
definitions = pytest.importorskip("schemathesis.specs.openapi.definitions")

CASES = {
    ("post", "/v1/chat/completions"): 614,
    ("post", "/v1/completions"): 500,
    ("post", "/v1/responses"): 400,
    ("post", "/tokenize"): 300,
    ("post", "/detokenize"): 150,
    ("get", "/v1/models/{name}"): 30,
    ("get", "/v1/models"): 1,
    ("get", "/version"): 1,
    ("get", "/health"): 1,
    ("get", "/health/live"): 1,
    ("get", "/health/ready"): 1,
    ("get", "/metrics"): 1,
}
CHECKS = [
    schemathesis.checks.not_a_server_error,
    rules.status_code_conformance,
    rules.content_type_conformance,
    rules.response_schema_conformance,
    rules.negative_data_rejection,
]
# Served requests need these values; random names and texts would almost always be refused.
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hé"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hé"},
    "/v1/responses": {"model": MODEL, "input": "hé"},
    "/tokenize": {"model": MODEL, "prompt": "hé"},
    "/detokenize": {"model": MODEL, "tokens": [104, 105]},
}
FEW_FIELDS = 4
MIN_SERVED_SHARE = 0.1  # share of the requests per operation
EVENT = "data: "
END = "[DONE]"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server() as server:
        yield server.url


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_the_schema_is_valid(schema: Any) -> None:
    assert schema.raw_schema["openapi"] == "3.1.0"
    definitions.OPENAPI_31_VALIDATOR.validate(schema.raw_schema)


def test_every_operation_is_requested(schema: Any) -> None:
    asked = {(method, path) for path, methods in schema.raw_schema["paths"].items() for method in methods}
    assert asked == CASES.keys()
    assert sum(CASES.values()) == 2000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("method", "path"), CASES, ids=map(" ".join, CASES))
def test_every_answer_matches_the_schema(schema: Any, method: str, path: str) -> None:
    counts: Counter[int] = Counter()
    events = event_schema(schema.raw_schema, method, path)

    @given(case=cases(schema[path][method]))
    @settings(max_examples=CASES[method, path], deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        response = case.call(timeout=60)
        counts[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            check_events(response.text, events)

    ask()
    print(f"{method} {path}: {dict(sorted(counts.items()))}")
    assert counts.total() >= CASES[method, path], "fewer were asked than were meant to be"
    least = MIN_SERVED_SHARE if path in SOUND else 0
    assert counts[200] >= least * counts.total(), "hardly any was served, so this showed little"


def cases(operation: Any) -> SearchStrategy[Any]:
    """Generates valid requests with few fields, valid requests, and invalid requests."""
    allowed = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    if operation.path not in SOUND:
        return allowed
    return st.one_of(
        sound(allowed, SOUND[operation.path]),
        allowed,
        operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
    )


@st.composite
def sound(draw: DrawFn, allowed: SearchStrategy[Any], needed: dict[str, Any]) -> Any:
    """Generates a body with the required fields and a few optional fields."""
    case = draw(allowed)
    others = sorted(case.body.keys() - needed.keys())
    kept = draw(st.sets(st.sampled_from(others), max_size=FEW_FIELDS)) if others else set()
    case.body = {name: case.body[name] for name in kept} | needed
    return case


def event_schema(document: dict[str, Any], method: str, path: str) -> Draft202012Validator:
    """Returns the schema of parsed stream events, without the final marker."""
    content = document["paths"][path][method]["responses"]["200"]["content"]
    data = content.get("text/event-stream", {}).get("schema", {"properties": {"data": {}}})["properties"]["data"]
    (read,) = [one["contentSchema"] for one in (data, *data.get("anyOf", ())) if "contentSchema" in one] or [False]
    return Draft202012Validator({"allOf": [read], "components": document["components"]})


def check_events(text: str, data: Draft202012Validator) -> None:
    """Asserts that each answer matches the schema."""
    found = [line.removeprefix(EVENT) for line in text.splitlines() if line.startswith(EVENT)]
    assert found
    for one in found:
        if one != END:
            data.validate(json.loads(one))
