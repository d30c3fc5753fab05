"""The description of this server as a page to read: one file, which asks no other host for anything."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

Json = dict[str, Any]

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8886; }
code { font: 0.9em ui-monospace, monospace; }
"""


def docs_page(description: Json) -> str:
    """HTML of an OpenAPI document."""
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
