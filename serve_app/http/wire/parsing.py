"""From a body's bytes to a request, or to a refusal that is short whatever the body is.

Pure, and made for a thread beside the event loop.
"""

import re
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from cluster.errors import RequestError
from serve_app.http.wire.bounds import RequestBounds
from serve_app.http.wire.field_types import MAX_FAULTS, RequestPart

MAX_FAULT_CHARS = 200
MAX_NAME_CHARS = 64
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unserved": "unsupported_value",
}

RequestT = TypeVar("RequestT", bound=RequestPart)

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # to the body's end where unfinished: no byte is read twice


def parse(schema: type[RequestT], body: bytes, bounds: RequestBounds) -> RequestT:
    """The request in a JSON body."""
    _check_structure(body, bounds.containers)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {shortened(str(error))}", code="invalid_json") from error
    return check(schema, data, bounds)


def check(schema: type[RequestT], data: object, bounds: RequestBounds) -> RequestT:
    """The request that read data makes."""
    try:
        return schema.model_validate(data, context=bounds)
    except ValidationError as error:
        raise _refusal(error) from error


def shortened(text: str, most: int = MAX_FAULT_CHARS) -> str:
    """Its beginning, where it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def _check_structure(body: bytes, most: int) -> None:
    """Refuses more lists and objects than any request has: a pair of brackets becomes an object of a hundred bytes."""
    if _containers(body) > most and _containers(_STRING.sub(b"", body)) > most:
        raise RequestError(f"the body holds more than {most} lists and objects, which is the most this server takes")


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refusal(error: ValidationError) -> RequestError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = [(_path(fault["loc"]), shortened(fault["msg"])) for fault in faults[:MAX_FAULTS]]
    message = "; ".join(f"{path or 'body'}: {fault}" for path, fault in told)
    untold = len(faults) - len(told)
    return RequestError(f"{message}; and {untold} more" if untold else message, told[0][0] or None, _code(faults[0]))


def _code(fault: ErrorDetails) -> str:
    """What OpenAI calls it."""
    kind = fault["type"]
    return CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    return "".join(map(_step, location)).removeprefix(".")


def _step(part: Any) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{shortened(part, MAX_NAME_CHARS)}"
