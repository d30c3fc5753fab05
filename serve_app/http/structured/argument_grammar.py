"""The part of a grammar that a call's arguments keep to: one JSON object, or values between tags; pure."""

from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import RequestError
from serve_app.http.conversation.call_form import CallForm, TaggedArguments
from serve_app.http.structured.response_format import json_with_options

Spelt = Callable[[str], str]
"""Text as a grammar has it."""

REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})  # that ask for nothing
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})
READ_AS_JSON = frozenset({"integer", "number", "boolean", "null", "object", "array"})


def arguments_rule(
    rule: str, function: str, schema: Mapping[str, Any], form: CallForm, spelt: Spelt
) -> tuple[str, list[str]]:
    """What stands for the arguments in a rule of that name, and the rules that it needs. Raises RequestError."""
    if form.tags is None:
        return f"{rule}_json", [f"{rule}_json: %json {json_with_options(schema)}"]
    return _Tagged(rule, function, schema, form.tags, form.closing, spelt).rules()


class _Tagged:
    """Arguments between tags: what is text is read as it is, all else as JSON of its type."""

    def __init__(
        self, rule: str, function: str, schema: Mapping[str, Any], tags: TaggedArguments, closing: str, spelt: Spelt
    ) -> None:
        self._rule = rule
        self._function = function
        self._schema = schema
        self._tags = tags
        self._end = closing.split()[-1]  # with which a call ends, wherever it stands
        self._spelt = spelt

    def rules(self) -> tuple[str, list[str]]:
        schema = self._schema
        if unknown := sorted(schema.keys() - OF_OBJECTS - REMARKS):
            raise self._refusal(f"have {unknown[0]!r}, which this model's calls cannot be held to")
        properties: Mapping[str, Any] = schema.get("properties", {})
        if missing := sorted(set(schema.get("required", ())) - properties.keys()):
            raise self._refusal(f"require {missing[0]!r}, which is none of their properties")
        arguments: list[str] = []
        rules: list[str] = []
        for n, (key, value) in enumerate(properties.items()):
            name = f"{self._rule}_{n}"
            rules += self._value(name, key, value)
            begin = self._spelt(f"{self._tags.before_key}{key}{self._tags.before_value}")
            is_required = key in schema.get("required", ())
            arguments.append(f"{begin} {name}" if is_required else f"({begin} {name})?")
        return " ".join(arguments), rules

    def _value(self, name: str, key: str, schema: Any) -> list[str]:
        kinds = _kinds(schema)
        after = self._tags.after_value
        if kinds and kinds <= READ_AS_JSON:
            shared = {part: self._schema[part] for part in ("$defs", "definitions") if part in self._schema}
            return [f"{name}: %json {json_with_options({**shared, **schema})} {self._spelt(after)}"]
        if kinds and kinds <= {"string", "null"} and schema.keys() <= REMARKS | {"type", "anyOf", "nullable"}:
            return self._text(name)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else []) if kinds == {"string"} else []
        if choices and schema.keys() <= REMARKS | {"type", "enum", "const"} and all(map(self._is_plain, choices)):
            return [f"{name}: ({' | '.join(map(self._spelt, choices))}) {self._spelt(after)}"]
        raise self._refusal(f"have {key!r}, the schema of which this model's calls cannot be held to")

    def _text(self, name: str) -> list[str]:
        """Any text up to what ends it, but for one that would end the call."""
        mark = self._tags.after_value.strip()
        after = self._tags.after_value.partition(mark)[2]
        terminal = name.upper()
        return [
            f"{terminal}: {text_without(self._end)}",
            f"{name}_text[lazy]: {terminal} {self._spelt(mark)}",
            f"{name}: {name}_text {self._spelt(after)}",
        ]

    def _is_plain(self, choice: Any) -> bool:
        """Whether a text is read as it is written."""
        return isinstance(choice, str) and choice == choice.strip() and self._tags.after_value.strip() not in choice

    def _refusal(self, why: str) -> RequestError:
        return RequestError(f"tools: the parameters of {self._function} {why}", "tools")


def _kinds(schema: Any) -> frozenset[str]:
    """The types that a response parser casts a text to; none where it cannot tell."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    parts = [_kinds(part) for part in schema.get("anyOf", ())]
    if not all(parts):
        return frozenset()
    return frozenset(kinds.union(*parts))


def text_without(*marks: str) -> str:
    """A terminal: any text that spells none of these."""
    others = (f" & ~/(?s:.*){_literal(mark)}(?s:.*)/" for mark in marks)
    return f"/(?s:.*)/{''.join(others)}"


def _literal(text: str) -> str:
    """In a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):X}}}" for char in text)
