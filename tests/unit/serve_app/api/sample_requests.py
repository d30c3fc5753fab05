"""Request bodies, parsed requests and refusals for API tests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.errors import RequestError
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.request_schemas import ChatRequest, CompletionRequest, GenerationRequest

COMPLETION = {"model": "toy", "prompt": "hello"}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(COMPLETION | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(CHAT | fields)


def parsed(fields: dict[str, Any]) -> GenerationRequest:
    """Returns the request parsed from a JSON body."""
    schema = ChatRequest if "messages" in fields else CompletionRequest
    return parse(schema, json.dumps(fields).encode(), RequestBounds())


@contextmanager
def refusal_of(field: str, match: str | None = None) -> Iterator[None]:
    """Asserts that the block raises a refusal that names this field."""
    with pytest.raises(RequestError, match=match) as caught:
        yield
    assert caught.value.field == field
