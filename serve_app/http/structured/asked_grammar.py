"""The grammar that a request asks its answer to keep to, as text for the compiler; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from cluster.errors import RequestError
from protos.messages import MAX_GRAMMAR_BYTES
from serve_app.http.wire.grammar_fields import ResponseFormat, StructuredOutputs

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the parts of JSON: a small model may like to go on with it for ever


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar and the request's field that holds it."""

    text: str
    field: str


def asked_grammar(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> AskedGrammar | None:
    """None: the answer may be any text. Raises RequestError for what is no grammar, or a too large one."""
    by_form = None if form is None else _by_form(form)
    by_outputs = None if outputs is None else _by_outputs(outputs)
    if by_form is not None and by_outputs is not None:
        message = "response_format and structured_outputs both ask for a form of the answer, expected one of them"
        raise RequestError(message, "structured_outputs")
    asked = by_form or by_outputs
    if asked is not None and (size := len(asked.text.encode())) > MAX_GRAMMAR_BYTES:
        message = f"{asked.field} has {size} bytes as a grammar, expected at most {MAX_GRAMMAR_BYTES}"
        raise RequestError(message, asked.field)
    return asked


def _by_form(form: ResponseFormat) -> AskedGrammar | None:
    if form.type == "text":
        return None
    if form.json_schema is None:
        return _json({"type": "object"}, {"whitespace_pattern": WHITESPACE}, "response_format")
    field = "response_format.json_schema.schema"
    return _json(form.json_schema.schema_, {"whitespace_pattern": WHITESPACE}, field)


def _by_outputs(outputs: StructuredOutputs) -> AskedGrammar:
    whitespace = {"whitespace_pattern": outputs.whitespace_pattern or WHITESPACE}
    spacing = {"whitespace_flexible": False} if outputs.disable_any_whitespace else whitespace
    if outputs.json_ is not None:
        return _json(outputs.json_, spacing, "structured_outputs.json")
    if outputs.regex is not None:
        return AskedGrammar(LLMatcher.grammar_from_regex(outputs.regex), "structured_outputs.regex")
    if outputs.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return AskedGrammar(LLMatcher.grammar_from_lark(f"start: {choices}"), "structured_outputs.choice")
    if outputs.grammar is not None:
        return _notation(outputs.grammar, "structured_outputs.grammar")
    return _json({"type": "object"}, spacing, "structured_outputs.json_object")


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any], field: str) -> AskedGrammar:
    """What the compiler cannot keep to is refused, never left out."""
    overrides: Any = {**spacing, "lenient": False}
    return AskedGrammar(LLMatcher.grammar_from_json_schema(dict(schema), overrides=overrides), field)


def _notation(text: str, field: str) -> AskedGrammar:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{field} has {len(text)} characters, expected at most {MAX_GRAMMAR_BYTES}", field)
    try:
        return AskedGrammar(grammar_from("grammar", text), field)
    except ValueError as error:
        raise RequestError(f"{field}: {error}", field) from error
