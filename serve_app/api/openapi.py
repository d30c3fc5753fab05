"""OpenAPI description of the server, built from the schemas of requests and answers, and an HTML page of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.api.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    ErrorBody,
    HealthReport,
    ModelCard,
    ModelList,
    ProbeReport,
    ScoredChatCompletion,
    VersionReport,
)
from serve_app.api.responses_schemas import ResponseReply, ResponsesRequest, ResponseStreamEvent
from serve_app.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)

Json = dict[str, Any]

OPENAPI = "3.1.0"  # understood by most tools; for streams, the schema is that of each event
REFERENCE = "#/components/schemas/{model}"
KEY = "api_key"
DONE = "[DONE]"  # data of a stream's last event
UNREADY = frozenset({"/health", "/health/ready"})  # these answer 503 in their own format
REFUSALS = {  # errors of every endpoint that reads a body
    "400": "something is wrong in the request; `param` names it",
    "404": "the model is not served here",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "429": "there is no room now; `Retry-After` says when to try again",
    "500": "the server failed",
    "503": "the server is stopping, or no target can be reached",
}


@dataclass(frozen=True)
class Operation:
    """One endpoint."""

    method: Literal["get", "post"]
    path: str
    summary: str
    asked: type[BaseModel] | None = None
    answers: tuple[type[BaseModel], ...] = ()  # one of these; none: plain text
    chunk: type[BaseModel] | None = None  # data of each event of a stream
    is_done_said: bool = True  # whether streams end with DONE, even after an error
    needs_key: bool = True


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "An answer in a conversation",
        ChatRequest,
        (ChatCompletion, ScoredChatCompletion),
        ChatChunk,
    ),
    Operation("post", "/v1/completions", "How a text goes on", CompletionRequest, (Completion,), CompletionChunk),
    Operation(
        "post",
        "/v1/responses",
        "An answer, told in items",
        ResponsesRequest,
        (ResponseReply,),
        ResponseStreamEvent,
        is_done_said=False,
    ),
    Operation("post", "/tokenize", "The tokens of a text or a conversation", TokenizeRequest, (TokenizeReply,)),
    Operation("post", "/detokenize", "The text of tokens", DetokenizeRequest, (DetokenizeReply,)),
    Operation("get", "/v1/models", "The names of the model that is served", answers=(ModelList,)),
    Operation("get", "/v1/models/{name}", "One of them", answers=(ModelCard,)),
    Operation("get", "/version", "The version of this server", answers=(VersionReport,), needs_key=False),
    Operation("get", "/health", "Whether requests can be served", answers=(HealthReport,), needs_key=False),
    Operation("get", "/health/live", "Whether the process that answers works", answers=(ProbeReport,), needs_key=False),
    Operation("get", "/health/ready", "Whether requests can be served", answers=(ProbeReport,), needs_key=False),
    Operation("get", "/metrics", "What all processes have measured, for Prometheus", needs_key=False),
)


def description(version: str, *, with_keys: bool) -> Json:
    """Returns the OpenAPI document."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, with_keys)
    components: Json = {"schemas": _schemas()}
    if with_keys:
        components["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    about = {"title": "Slipstream", "version": version}
    return {"openapi": OPENAPI, "info": about, "paths": paths, "components": components}


def _schemas() -> Json:
    asked = [(one.asked, "validation") for one in OPERATIONS if one.asked is not None]
    told = [model for one in OPERATIONS for model in (*one.answers, one.chunk) if model is not None]
    answers = [(model, "serialization") for model in told]
    models: Any = [*asked, *answers, (ErrorBody, "serialization")]
    _, found = models_json_schema(models, ref_template=REFERENCE)
    schemas: Json = found["$defs"]
    return schemas


def _operation(operation: Operation, with_keys: bool) -> Json:
    refusals: Json = dict(REFUSALS) if operation.asked is not None else {}
    if "{name}" in operation.path:
        refusals["404"] = REFUSALS["404"]
    made: Json = {"summary": operation.summary, "operationId": f"{operation.method}{operation.path}"}
    if operation.asked is not None:
        made["requestBody"] = {"required": True, "content": _as_json(operation.asked)}
    if "{name}" in operation.path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.needs_key and with_keys:
        made["security"] = [{KEY: []}]
        refusals["401"] = "no key, or one that is not known"
    made["responses"] = {"200": {"description": "the answer", "content": dict(_answers(operation))}}
    for status, why in sorted(refusals.items()):
        made["responses"][status] = {"description": why, "content": _as_json(ErrorBody)}
    if operation.path in UNREADY:
        made["responses"]["503"] = {"description": "they cannot", "content": _as_json(*operation.answers)}
    return made


def _answers(operation: Operation) -> Iterable[tuple[str, Json]]:
    if not operation.answers:
        yield "text/plain", {"schema": {"type": "string"}}
    else:
        yield from _as_json(*operation.answers).items()
    if operation.chunk is not None:
        yield "text/event-stream", {"schema": _event(operation.chunk, operation.is_done_said)}


def _event(chunk: type[BaseModel], is_done_said: bool) -> Json:
    """Describes the events of a stream."""
    told = {"anyOf": [_reference(chunk), _reference(ErrorBody)]} if is_done_said else _reference(chunk)
    data: Json = {"contentMediaType": "application/json", "contentSchema": told}
    data = {"anyOf": [{"const": DONE}, data]} if is_done_said else data
    return {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"} | data}}


def _as_json(*models: type[BaseModel]) -> Json:
    references = [_reference(model) for model in models]
    return {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": REFERENCE.format(model=model.__name__)}


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
        '<p>The same for machines: <a href="openapi.json">openapi.json</a>.</p>'
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
