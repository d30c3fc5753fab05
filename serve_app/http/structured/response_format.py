"""The grammar that a request asks its answer to keep to, as text for the compiler; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from cluster.errors import RequestError
from protos.messages import MAX_GRAMMAR_BYTES
from serve_app.http.wire.grammar_fields import AnswerFormat, StructuredOutputs

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the parts of JSON: a small model may like to go on with it for ever


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar and the request's field that holds it."""

    text: str
    field: str


def asked_grammar(form: AnswerFormat | None, outputs: StructuredOutputs | None) -> AskedGrammar | None:
    """None: the answer may be any text. Raises RequestError for what is no grammar, or a too large one."""
    by_form = None if form is None else _by_form(form)
    by_outputs = None if outputs is None else _by_outputs(outputs)
    if form is not None and by_form is not None and by_outputs is not None:
        message = f"{form.field} and structured_outputs both ask for a form of the answer, expected one of them"
        raise RequestError(message, "structured_outputs")
    asked = by_form or by_outputs
    return None if asked is None else within_bounds(asked)


def within_bounds(asked: AskedGrammar) -> AskedGrammar:
    """The same; raises RequestError for one that is too large."""
    if (size := len(asked.text.encode())) > MAX_GRAMMAR_BYTES:
        message = f"{asked.field} has {size} bytes as a grammar, expected at most {MAX_GRAMMAR_BYTES}"
        raise RequestError(message, asked.field)
    return asked


def check_end(asked: AskedGrammar | None, *, ignore_eos: bool) -> None:
    """Refuses an answer that is to go on where its grammar ends."""
    if asked is not None and ignore_eos:
        message = f"ignore_eos is true, expected false: with {asked.field} the answer ends where its grammar does"
        raise RequestError(message, "ignore_eos")


def json_with_options(schema: Mapping[str, Any]) -> str:
    """A JSON schema inside of another grammar: what the compiler cannot keep to is refused, as in one by itself."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}})


def _by_form(form: AnswerFormat) -> AskedGrammar | None:
    if form.type == "text":
        return None
    spacing = {"whitespace_pattern": WHITESPACE}
    if form.asked_schema is None:
        return _json({"type": "object"}, spacing, form.field)
    return _json(form.asked_schema, spacing, form.schema_field)


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
