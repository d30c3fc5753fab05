"""The OpenAPI document, which FastAPI builds from the routes, and an HTML page that shows it.

`BodyRoute` lets FastAPI document the endpoints that parse bodies themselves. The page at /docs lists every request
field and loads nothing from other hosts. FastAPI's own page would load Swagger UI from a CDN, and no dependency ships
its files.
"""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from fastapi import FastAPI, Security
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

from serve_app.api.replies import ErrorBody

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"
DONE = "[DONE]"  # data of the last event of a stream
ERRORS = {
    400: "Invalid request; `param` names the field",
    401: "Missing or unknown API key",
    404: "Unknown model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "No capacity; retry after `Retry-After` seconds",
    500: "Internal error",
    503: "The server is stopping, or no target is available",
}
BODY_ERRORS = (400, 404, 408, 413, 429, 500, 503)
KEY = Security(HTTPBearer(scheme_name="api_key", auto_error=False))  # documents the check in `AuthMiddleware`


def errors(*statuses: int) -> dict[int | str, Json]:
    """Returns the documentation of error responses."""
    return {status: {"model": ErrorBody, "description": ERRORS[status]} for status in statuses}


class BodyRoute(APIRoute):
    """A POST route documented by FastAPI and served by an ASGI application.

    The application parses the body itself, to limit its size and to report precise errors.
    """

    def __init__(
        self,
        path: str,
        app: ASGIApp,
        *,
        summary: str,
        body: type[BaseModel],
        reply: Any,
        event: type[BaseModel] | None = None,
        ends_with_done: bool = True,
        needs_key: bool,
    ) -> None:
        """`event` is the type of a stream's events; with `ends_with_done`, `DONE` ends every stream, even after an
        error.
        """

        def described(request: Any) -> None:
            """Declares the type of the body."""

        described.__annotations__["request"] = body
        responses = errors(*BODY_ERRORS, *((401,) if needs_key else ()))
        if event is not None:
            responses[200] = {"content": {"text/event-stream": {"schema": _event_schema(event, ends_with_done)}}}
        super().__init__(
            path,
            described,
            methods=["POST"],
            summary=summary,
            description="",
            operation_id=f"post{path}",
            response_model=reply,
            responses=responses,
            dependencies=[KEY] if needs_key else [],
        )
        self.app = app
        self.event = event


def _event_schema(event: type[BaseModel], ends_with_done: bool) -> Json:
    """Returns the schema of a stream's events."""
    reference = {"$ref": REFERENCE.format(model=event.__name__)}
    if not ends_with_done:
        data: Json = {"contentMediaType": "application/json", "contentSchema": reference}
    else:
        error = {"$ref": REFERENCE.format(model=ErrorBody.__name__)}
        content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [reference, error]}}
        data = {"anyOf": [{"const": DONE}, content]}
    return {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"} | data}}


def openapi_document(api: FastAPI, *, needs_key: bool) -> Json:
    """Returns FastAPI's document, with event schemas added and 422 responses removed, since none are sent.

    Cached, since all applications of a process document the same routes.
    """
    if needs_key not in _documents:
        _documents[needs_key] = _build_document(api)
    return _documents[needs_key]


_documents: dict[bool, Json] = {}  # key: whether requests need an API key


def _build_document(api: FastAPI) -> Json:
    document = get_openapi(title=api.title, version=api.version, routes=api.routes)
    schemas = document["components"]["schemas"]
    events = [route.event for route in api.routes if isinstance(route, BodyRoute) and route.event is not None]
    _, generated = models_json_schema([(event, "serialization") for event in events], ref_template=REFERENCE)
    schemas.update(generated["$defs"])
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8886; }
code { font: 0.9em ui-monospace, monospace; }
"""


def docs_page(description: Json) -> str:
    """Renders an OpenAPI document as one HTML page that loads nothing from other hosts."""
    schemas = description["components"]["schemas"]
    about = description["info"]
    sections = [
        _section(method, path, operation, schemas)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]
    title = f"{escape(about['title'])} {escape(about['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        '<p>Machine-readable version: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(sections)}</body></html>"
    )


def _section(method: str, path: str, operation: Json, schemas: Json) -> str:
    head = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"
    body = operation.get("requestBody")
    if body is None:
        return head
    schema = _resolved(body["content"]["application/json"]["schema"], schemas)
    rows = "".join(_row(name, field, name in schema.get("required", ()), schemas) for name, field in _fields(schema))
    return f"{head}<table><tr><th>field</th><th>value</th><th>default</th></tr>{rows}</table>"


def _fields(schema: Json) -> Iterable[tuple[str, Json]]:
    properties: Json = schema["properties"]
    return properties.items()


def _row(name: str, field: Json, required: bool, schemas: Json) -> str:
    default = "required" if required else escape(str(field.get("default", "")))
    kinds = " or ".join(dict.fromkeys(_kinds(field, schemas)))
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(kinds)}</td><td>{default}</td></tr>"


def _kinds(field: Json, schemas: Json) -> Iterator[str]:
    for part in field.get("anyOf") or field.get("oneOf") or [field]:
        if "anyOf" in part or "oneOf" in part:
            yield from _kinds(part, schemas)
        elif "$ref" in part:
            yield part["$ref"].rpartition("/")[2]
        elif "enum" in part or "const" in part:
            yield from (str(value) for value in part.get("enum", [part.get("const")]))
        elif part.get("type") == "array":
            yield "list of " + " or ".join(dict.fromkeys(_kinds(part.get("items", {}), schemas)))
        elif part.get("type") != "null":
            yield str(part.get("type", "any"))


def _resolved(schema: Json, schemas: Json) -> Json:
    resolved: Json = schemas[schema["$ref"].rpartition("/")[2]]
    return resolved
