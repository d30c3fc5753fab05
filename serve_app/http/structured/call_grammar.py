"""The grammar of an answer that must call a tool, or whose calls must keep to their schemas; pure.

It is written in the model's own form of calls, so that what the response parser reads are calls of the tools that were
offered, with arguments by their schemas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from serve_app.http.conversation.call_form import CallForm
from serve_app.http.conversation.response_templates import ReasoningInPrompt
from serve_app.http.structured.argument_grammar import arguments_rule, text_without
from serve_app.http.structured.response_format import AskedGrammar, within_bounds

PLAIN_NAME = re.compile(r"[\w.:/-]+", re.ASCII)
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedCall:
    """A tool that may be called; without a schema its arguments are any."""

    name: str
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Calling:
    """Which calls an answer has."""

    tools: Sequence[OfferedCall]
    must: bool  # it calls, and says nothing else
    several: bool
    content: AskedGrammar | None  # what it is where it does not call; None: any text


class CallGrammar:
    """Writes grammars for one model."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._special_ids = form.special_ids

    def asked(self, calling: Calling, reasoning: ReasoningInPrompt) -> AskedGrammar:
        """The grammar of an answer to a prompt that has this of its reasoning. Raises RequestError."""
        content = calling.content
        rules = [self._start(calling, reasoning), *self._calls(calling), *self._texts()]
        grammars: list[Any] = [{"name": "answer", "lark_grammar": "\n".join(rules)}]
        if content is not None and not calling.must:
            grammars.append({**_first(content), "name": "content"})
        return within_bounds(AskedGrammar(json.dumps({"grammars": grammars}, ensure_ascii=False), "tools"))

    def _start(self, calling: Calling, reasoning: ReasoningInPrompt) -> str:
        thinking = self._form.thinking
        is_begun = thinking is not None and reasoning == "begun"
        if not calling.must and calling.content is None:
            free = self._free(calling)
            return f"start: after_thought {free} | unfinished_thought" if is_begun else f"start: {free}"
        said = "calls" if calling.must else "(calls | @content)"
        if thinking is None or reasoning == "over":
            return f"start: {said}"
        first = "after_thought GAP?"
        return f"start: {first if is_begun else f'({self._spelt(thinking[0])} {first})?'} {said}"

    def _free(self, calling: Calling) -> str:
        """Text, thoughts and calls as they come."""
        thinks = self._form.thinking is not None
        loop = ["aside", *(["until_thought after_thought"] if thinks else [])]
        last = ["TEXT", *(["until_thought unfinished_thought"] if thinks else [])]
        (loop if calling.several else last).append("until_call further_calls")
        return f"({' | '.join(loop)})* ({' | '.join(last)})"

    def _calls(self, calling: Calling) -> list[str]:
        form = self._form
        more = f" ({self._spelt(form.between)} one_call)*" if calling.several else ""
        listed = f"one_call{more} {self._spelt(form.closing)}"
        names = [f"call_{n}" for n in range(len(calling.tools))]
        rules = [
            f"calls: {self._spelt(form.opening)} {listed}",
            f"further_calls: {self._spelt(form.opening.removeprefix(self._trigger))} {listed}",
            f"one_call: {' | '.join(names)}",
        ]
        for name, tool in zip(names, calling.tools, strict=True):
            rules += self._call(name, tool)
        return rules

    def _call(self, rule: str, tool: OfferedCall) -> list[str]:
        if PLAIN_NAME.fullmatch(tool.name) is None:
            message = f"tools: {tool.name!r} is no plain name, expected letters, digits and - _ . : / only: calls of it"
            raise RequestError(f"{message} cannot be held to a form", "tools")
        schema = ANY_ARGUMENTS if tool.schema is None else _of_object(tool.name, tool.schema)
        arguments, rules = arguments_rule(rule, tool.name, schema, self._form, self._spelt)
        return [f"{rule}: {self._spelt(tool.name + self._form.middle)} {arguments}", *rules]

    def _texts(self) -> list[str]:
        """Texts with any other special tokens in them, and the marks that end them."""
        thinking = self._form.thinking
        marks = [self._trigger, *(thinking[:1] if thinking else ())]
        rules = [
            f"TEXT: {text_without(*marks)}",
            f"aside: TEXT {self._special_but(marks)}",
            self._until("until_call", "TEXT", self._trigger),
        ]
        if thinking is not None:
            opening, closing = thinking
            rules += [
                r"GAP: /[ \n]{1,4}/",
                f"THOUGHT: {text_without(closing)}",
                self._until("until_thought", "TEXT", opening),
                self._until("end_of_thought", "THOUGHT", closing),
                f"aside_in_thought: THOUGHT {self._special_but([closing])}",
                "after_thought: aside_in_thought* end_of_thought",
                "unfinished_thought: aside_in_thought* THOUGHT",
            ]
        return rules

    def _special_but(self, marks: Sequence[str]) -> str:
        """Any special token but these."""
        others = [str(token) for text, token in self._special_ids.items() if text not in marks]
        return f"<[{','.join(others)}]>" if others else '""'

    @property
    def _trigger(self) -> str:
        """By which free text ends: a special token, or what comes before one."""
        first, *_ = self._pieces(self._form.trigger)
        return first

    def _until(self, rule: str, text: str, mark: str) -> str:
        return f"{rule}{'' if mark in self._special_ids else '[lazy]'}: {text} {self._spelt(mark)}"

    def _spelt(self, text: str) -> str:
        """As the grammar has it: strings, and special tokens by their numbers."""
        parts = [
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece, ensure_ascii=False)
            for piece in self._pieces(text)
        ]
        return " ".join(parts)

    def _pieces(self, text: str) -> list[str]:
        if not self._special_ids:
            return [text] if text else []
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if piece]


def _first(asked: AskedGrammar) -> dict[str, Any]:
    """A grammar as one of several."""
    try:
        (only,) = json.loads(asked.text)["grammars"]
    except ValueError:  # in Lark's notation, as it is
        return {"lark_grammar": asked.text}
    return dict(only)


def _of_object(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object":
        message = f"tools: the parameters of {name} are of type {kind!r}, expected 'object'"
        raise RequestError(message, "tools")
    return {"type": "object", **schema}
