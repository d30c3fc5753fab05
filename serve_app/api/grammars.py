"""Structured output: builds the grammar of a request's answer and checks that it compiles.

A grammar constrains the content (`response_format`, `structured_outputs`), the calls (strict tools, `tool_choice`), or
both. Call grammars are written in the model's own call format, so the response parser reads what they produce as calls
of the offered tools with arguments that match their schemas. Building is pure; compiling runs beside the event loop.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from actors.grammars import LIMITS, GrammarCompiler
from cluster.errors import CapacityError, GrammarError, RequestError
from protos.messages import MAX_GRAMMAR_BYTES
from serve_app.api.fields import AnswerFormat, StructuredOutputs
from serve_app.api.request_schemas import ChatRequest, NamedTool, Tool
from serve_app.api.tool_calls import AnswerForm, CallForm, ReasoningInPrompt, TaggedArguments

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # limits whitespace between JSON tokens, which small models may repeat forever


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar and the request field that contains it."""

    text: str
    field: str
    content: "RequestedGrammar | None" = None  # part that reasoning or calls may precede; must be valid alone


def content_grammar(form: AnswerFormat | None, outputs: StructuredOutputs | None) -> RequestedGrammar | None:
    """Returns the grammar of the content, if any. Raises RequestError if it is invalid or too large."""
    by_form = None if form is None else _by_form(form)
    by_outputs = None if outputs is None else _by_outputs(outputs)
    if form is not None and by_form is not None and by_outputs is not None:
        message = f"{form.field} and structured_outputs both constrain the answer, expected one of them"
        raise RequestError(message, "structured_outputs")
    grammar = by_form or by_outputs
    return None if grammar is None else within_bounds(grammar)


def within_bounds(grammar: RequestedGrammar) -> RequestedGrammar:
    """Returns the grammar unchanged. Raises RequestError if it is too large."""
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        message = f"{grammar.field} has {size} bytes as a grammar, expected at most {MAX_GRAMMAR_BYTES}"
        raise RequestError(message, grammar.field)
    return grammar


def check_end(grammar: RequestedGrammar | None, *, ignore_eos: bool) -> None:
    """Raises RequestError if `ignore_eos` would force the answer past its grammar's end."""
    if grammar is not None and ignore_eos:
        message = f"ignore_eos is true, expected false: {grammar.field} determines the end of the answer"
        raise RequestError(message, "ignore_eos")


def json_with_options(schema: Mapping[str, Any], fallback: Mapping[str, Any] | None = None) -> str:
    """Returns a JSON schema for use inside another grammar.

    Without a fallback, the compiler refuses keywords that it cannot enforce. With one, it ignores them, and a schema
    that still does not compile is replaced by the fallback.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": fallback is not None}
    text = json.dumps({**schema, "x-guidance": options})
    is_small = len(text) <= MAX_GRAMMAR_BYTES  # larger ones are refused later
    if fallback is not None and is_small and LLMatcher.validate_grammar(f"start: %json {text}", limits=LIMITS):
        return json_with_options(fallback)
    return text


def _by_form(form: AnswerFormat) -> RequestedGrammar | None:
    if form.type == "text":
        return None
    spacing = {"whitespace_pattern": WHITESPACE}
    if form.answer_schema is None:
        return _json({"type": "object"}, spacing, form.field)
    return _json(form.answer_schema, spacing, form.schema_field)


def _by_outputs(outputs: StructuredOutputs) -> RequestedGrammar:
    whitespace = {"whitespace_pattern": outputs.whitespace_pattern or WHITESPACE}
    spacing = {"whitespace_flexible": False} if outputs.disable_any_whitespace else whitespace
    if outputs.json_ is not None:
        return _json(outputs.json_, spacing, "structured_outputs.json")
    if outputs.regex is not None:
        return RequestedGrammar(LLMatcher.grammar_from_regex(outputs.regex), "structured_outputs.regex")
    if outputs.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return RequestedGrammar(LLMatcher.grammar_from_lark(f"start: {choices}"), "structured_outputs.choice")
    if outputs.grammar is not None:
        return _notation(outputs.grammar, "structured_outputs.grammar")
    return _json({"type": "object"}, spacing, "structured_outputs.json_object")


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any], field: str) -> RequestedGrammar:
    """Returns a rule for JSON. Unsupported keywords are refused, never ignored."""
    overrides: Any = {**spacing, "lenient": False}
    try:
        return RequestedGrammar(LLMatcher.grammar_from_json_schema(dict(schema), overrides=overrides), field)
    except ValueError as error:  # an integer of more than 64 bits
        raise RequestError(f"{field}: {error}", field) from error


# llguidance's own test takes quadratic time for empty lines, and holds the interpreter's lock.
LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")


def _notation(text: str, field: str) -> RequestedGrammar:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{field} has {len(text)} characters, expected at most {MAX_GRAMMAR_BYTES}", field)
    if LARK.search(text) is not None:
        return RequestedGrammar(LLMatcher.grammar_from_lark(text), field)
    try:
        return RequestedGrammar(LLMatcher.grammar_from_lark(gbnf_to_lark(text)), field)
    except Exception as error:  # the library has no class for all its errors
        raise RequestError(f"{field} is neither Lark nor valid GBNF: {error}", field) from error


Literals = Callable[[str], str]
"""Formats text as grammar literals."""

IGNORED_KEYWORDS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})  # not enforced
OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)
JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})


ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedCall:
    """Callable tool; without a schema, any arguments are valid."""

    name: str
    schema: Mapping[str, Any] | None
    strict: bool  # True: refuse a schema that cannot be enforced; False: enforce it as far as possible


def arguments_rule(
    rule: str, tool: OfferedCall, schema: Mapping[str, Any], form: CallForm, literals: Literals
) -> tuple[str, list[str]]:
    """Returns the rule for a call's arguments, and its helper rules.

    Raises RequestError if the schema of a strict tool cannot be enforced.
    """
    if form.tags is None:
        written = json_with_options(schema, None if tool.strict else ANY_ARGUMENTS)
        return f"{rule}_json", [f"{rule}_json: %json {written}"]
    tagged = _Tagged(rule, tool, schema, form.tags, form.closing, literals)
    if tool.schema is None:
        return tagged.any_rules()
    try:
        return tagged.rules()
    except RequestError:
        if tool.strict:
            raise
    except (AttributeError, TypeError) as error:  # a keyword's value has another type, as in "required": null
        if tool.strict:
            message = f"tools: the parameters of {tool.name} are not a valid JSON schema; correct them"
            raise RequestError(message, "tools") from error
    return tagged.any_rules()


class _Tagged:
    """Builds rules for tagged arguments: strings verbatim, other types as JSON."""

    def __init__(
        self,
        rule: str,
        tool: OfferedCall,
        schema: Mapping[str, Any],
        tags: TaggedArguments,
        closing: str,
        literals: Literals,
    ) -> None:
        self._rule = rule
        self._tool = tool
        self._schema = schema
        self._tags = tags
        self._end = closing.split()[-1]  # marker that always ends a call
        self._literals = literals

    def rules(self) -> tuple[str, list[str]]:
        schema = self._schema
        if unknown := sorted(schema.keys() - OBJECT_KEYWORDS - IGNORED_KEYWORDS):
            raise self._refusal(f"have {unknown[0]!r}, which cannot be enforced in this model's calls; remove it")
        properties: Mapping[str, Any] = schema.get("properties", {})
        if missing := sorted(set(schema.get("required", ())) - properties.keys()):
            raise self._refusal(f"require {missing[0]!r}, which is not in properties; add it there")
        arguments: list[str] = []
        rules: list[str] = []
        for n, (key, value) in enumerate(properties.items()):
            name = f"{self._rule}_{n}"
            rules += self._value(name, key, value)
            begin = self._literals(f"{self._tags.before_key}{key}{self._tags.before_value}")
            is_required = key in schema.get("required", ())
            arguments.append(f"{begin} {name}" if is_required else f"({begin} {name})?")
        return " ".join(arguments), rules

    def _value(self, name: str, key: str, schema: Any) -> list[str]:
        kinds = _kinds(schema)
        after = self._tags.after_value
        if kinds and kinds <= JSON_TYPES:
            shared = {part: self._schema[part] for part in ("$defs", "definitions") if part in self._schema}
            fallback = None if self._tool.strict else {"type": sorted(kinds)}
            return [f"{name}: %json {json_with_options({**shared, **schema}, fallback)} {self._literals(after)}"]
        if kinds and kinds <= {"string", "null"} and schema.keys() <= IGNORED_KEYWORDS | {"type", "anyOf", "nullable"}:
            return self._text(name, after)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else []) if kinds == {"string"} else []
        if (
            choices
            and schema.keys() <= IGNORED_KEYWORDS | {"type", "enum", "const"}
            and all(map(self._is_plain, choices))
        ):
            return [f"{name}: ({' | '.join(map(self._literals, choices))}) {self._literals(after)}"]
        raise self._refusal(f"have {key!r}, whose schema cannot be enforced in this model's calls; simplify it")

    def any_rules(self) -> tuple[str, list[str]]:
        """Returns rules for any number of arguments with any names and values."""
        key, value, one = f"{self._rule}_key", f"{self._rule}_value", f"{self._rule}_argument"
        rules = self._text(key, self._tags.before_value) + self._text(value, self._tags.after_value)
        return f"{one}*", [f"{one}: {self._literals(self._tags.before_key)} {key} {value}", *rules]

    def _text(self, name: str, end: str) -> list[str]:
        """Returns rules for text up to the tag `end`; the text cannot contain the end of the call."""
        mark = end.strip()
        after = end.partition(mark)[2]
        terminal = name.upper()
        return [
            f"{terminal}: {text_excluding(self._end)}",
            f"{name}_text[lazy]: {terminal} {self._literals(mark)}",
            f"{name}: {name}_text {self._literals(after)}",
        ]

    def _is_plain(self, choice: Any) -> bool:
        """Returns whether the parser reads a value as verbatim text."""
        return isinstance(choice, str) and choice == choice.strip() and self._tags.after_value.strip() not in choice

    def _refusal(self, why: str) -> RequestError:
        return RequestError(f"tools: the parameters of {self._tool.name} {why}", "tools")


def _kinds(schema: Any) -> frozenset[str]:
    """Returns the JSON types for the response parser's cast; empty if the schema leaves them open."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    parts = [_kinds(part) for part in schema.get("anyOf", ())]
    if not all(parts):
        return frozenset()
    return frozenset(kinds.union(*parts))


def text_excluding(*marks: str) -> str:
    """Returns a terminal for text that contains none of `marks`."""
    others = (f" & ~/(?s:.*){_literal(mark)}(?s:.*)/" for mark in marks)
    return f"/(?s:.*)/{''.join(others)}"


def _literal(text: str) -> str:
    """Escapes text for a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):X}}}" for char in text)


COMPILE_S = 5.0  # time limit, including the wait for earlier compilations


class GrammarCheck:
    """Compiles each requested grammar once, with the target's limits."""

    def __init__(self, compiler: GrammarCompiler | None, limit_s: float = COMPILE_S) -> None:
        """Without a compiler, output cannot be constrained and every grammar is refused."""
        self._compiler = compiler
        self._limit_s = limit_s

    async def check(self, grammar: RequestedGrammar) -> None:
        """Compiles the grammar. Raises RequestError for its request field if that fails.

        Raises CapacityError if the grammars of other requests are compiled first; this one then leaves their queue.
        """
        if self._compiler is None:
            message = f"{grammar.field} is not supported for this model; see the server's startup log"
            raise RequestError(message, grammar.field)
        if grammar.content is not None:
            await self.check(grammar.content)
        compiled = self._compiler.begin(grammar.text)
        compiling = asyncio.wrap_future(compiled)
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.shield(compiling)  # other requests may wait for the same grammar
        except GrammarError as error:
            raise RequestError(f"{grammar.field}: {error}", grammar.field) from error
        except TimeoutError as error:
            if not compiled.running():
                compiled.cancel()
                raise _busy(grammar) from error
            message = f"{grammar.field} did not compile within {self._limit_s} s; simplify it or try again"
            raise RequestError(message, grammar.field) from error
        except asyncio.CancelledError:
            if not compiled.cancelled():
                raise
            raise _busy(grammar) from None  # an earlier request for the same grammar has stopped waiting


def _busy(grammar: RequestedGrammar) -> CapacityError:
    return CapacityError(f"{grammar.field} waits for other grammars to compile; try again later")


PLAIN_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Calling:
    """The calls that an answer may or must contain."""

    tools: Sequence[OfferedCall]
    must: bool  # the answer must consist of calls
    several: bool
    content: RequestedGrammar | None  # grammar of an answer without calls; None allows any text


class AnswerGrammar:
    """Builds grammars of answers that may begin with reasoning, for one model's markers."""

    def __init__(self, form: AnswerForm) -> None:
        self._thinking = form.thinking
        self._special_ids = form.special_ids

    def with_reasoning(self, content: RequestedGrammar, reasoning: ReasoningInPrompt) -> RequestedGrammar:
        """Returns the grammar of free reasoning and then `content`, given the reasoning in the prompt.

        Raises RequestError if it is too large.
        """
        if self._thinking is None or reasoning == "over":
            return content
        rules = [f"start: {self._reasoning_first(reasoning)}@content", *self._reasoning_rules()]
        return _joined(rules, content, content.field)

    def _reasoning_first(self, reasoning: ReasoningInPrompt) -> str:
        """Returns the expression of the answer's reasoning, given the reasoning in the prompt."""
        if self._thinking is None or reasoning == "over":
            return ""
        rest = "after_thought GAP?"
        return f"{rest} " if reasoning == "begun" else f"({self._literals(self._thinking[0])} {rest})? "

    def _reasoning_rules(self) -> list[str]:
        if self._thinking is None:
            return []
        _, closing = self._thinking
        return [
            r"GAP: /[ \n]{1,4}/",
            f"THOUGHT: {text_excluding(closing)}",
            self._rule_until("end_of_thought", "THOUGHT", closing),
            f"aside_in_thought: THOUGHT {self._special_but([closing])}",
            "after_thought: aside_in_thought* end_of_thought",
            "unfinished_thought: aside_in_thought* THOUGHT",
        ]

    def _special_but(self, marks: Sequence[str]) -> str:
        """Returns an expression for any special token except `marks`."""
        others = [str(token) for text, token in self._special_ids.items() if text not in marks]
        return f"<[{','.join(others)}]>" if others else '""'

    def _rule_until(self, rule: str, text: str, mark: str) -> str:
        return f"{rule}{'' if mark in self._special_ids else '[lazy]'}: {text} {self._literals(mark)}"

    def _literals(self, text: str) -> str:
        """Formats text for the grammar: strings as literals, special tokens by id."""
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


class CallGrammar(AnswerGrammar):
    """Builds call grammars for one model's call format."""

    def __init__(self, form: CallForm) -> None:
        super().__init__(form)
        self._form = form

    def grammar_for(self, calling: Calling, reasoning: ReasoningInPrompt) -> RequestedGrammar:
        """Returns the answer's grammar, given the reasoning that the prompt already contains. Raises RequestError."""
        rules = [self._start(calling, reasoning), *self._calls(calling), *self._texts()]
        return _joined(rules, None if calling.must else calling.content, "tools")

    def _start(self, calling: Calling, reasoning: ReasoningInPrompt) -> str:
        if not calling.must and calling.content is None:
            free = self._free(calling)
            is_begun = self._thinking is not None and reasoning == "begun"
            return f"start: after_thought {free} | unfinished_thought" if is_begun else f"start: {free}"
        answer = "calls" if calling.must else "(calls | @content)"
        return f"start: {self._reasoning_first(reasoning)}{answer}"

    def _free(self, calling: Calling) -> str:
        """Returns rules for text, reasoning and calls in any order."""
        has_thinking = self._thinking is not None
        loop = ["aside", *(["until_thought after_thought"] if has_thinking else [])]
        last = ["TEXT", *(["until_thought unfinished_thought"] if has_thinking else [])]
        (loop if calling.several else last).append("until_call further_calls")
        return f"({' | '.join(loop)})* ({' | '.join(last)})"

    def _calls(self, calling: Calling) -> list[str]:
        form = self._form
        more = f" ({self._literals(form.between)} one_call)*" if calling.several else ""
        listed = f"one_call{more} {self._literals(form.closing)}"
        names = [f"call_{n}" for n in range(len(calling.tools))]
        rules = [
            f"calls: {self._literals(form.opening)} {listed}",
            f"further_calls: {self._literals(form.opening.removeprefix(self._trigger))} {listed}",
            f"one_call: {' | '.join(names)}",
        ]
        for name, tool in zip(names, calling.tools, strict=True):
            rules += self._call(name, tool)
        return rules

    def _call(self, rule: str, tool: OfferedCall) -> list[str]:
        if PLAIN_NAME.fullmatch(tool.name) is None:
            message = f"tools: calls of {tool.name!r} cannot be constrained; use only letters, digits and - _ . : /"
            raise RequestError(f"{message} in its name", "tools")
        schema = ANY_ARGUMENTS if tool.schema is None else _object_schema(tool.name, tool.schema)
        arguments, rules = arguments_rule(rule, tool, schema, self._form, self._literals)
        return [f"{rule}: {self._literals(tool.name + self._form.middle)} {arguments}", *rules]

    def _texts(self) -> list[str]:
        """Returns rules for free text, including other special tokens, and for its end markers."""
        opening = self._thinking[:1] if self._thinking else ()
        marks = [self._trigger, *opening]
        return [
            f"TEXT: {text_excluding(*marks)}",
            f"aside: TEXT {self._special_but(marks)}",
            self._rule_until("until_call", "TEXT", self._trigger),
            *[self._rule_until("until_thought", "TEXT", mark) for mark in opening],
            *self._reasoning_rules(),
        ]

    @property
    def _trigger(self) -> str:
        """Returns the marker that ends free text: a special token, or the text before the next special token."""
        first, *_ = self._pieces(self._form.trigger)
        return first


def _joined(rules: Sequence[str], content: RequestedGrammar | None, field: str) -> RequestedGrammar:
    """Returns the grammar of an answer by its rules, which may refer to `content`. Raises RequestError if too large."""
    grammars: list[Any] = [{"name": "answer", "lark_grammar": "\n".join(rules)}]
    if content is not None:
        grammars.append({**_first(content), "name": "content"})
    return within_bounds(RequestedGrammar(json.dumps({"grammars": grammars}, ensure_ascii=False), field, content))


def _first(grammar: RequestedGrammar) -> dict[str, Any]:
    """Wraps a grammar as one entry of a list of grammars."""
    try:
        (only,) = json.loads(grammar.text)["grammars"]
    except ValueError:  # not JSON: a rule in Lark notation
        return {"lark_grammar": grammar.text}
    return dict(only)


def _object_schema(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object":
        message = f"tools: the parameters of {name} are of type {kind!r}, expected 'object'"
        raise RequestError(message, "tools")
    return {"type": "object", **schema}


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    request: ChatRequest,
    form: AnswerForm | None,
    content: RequestedGrammar | None,
    reasoning: Callable[[], ReasoningInPrompt],
) -> RequestedGrammar | None:
    """Returns the grammar of the whole answer; None if neither calls nor `content` are constrained.

    Raises RequestError if the calls cannot be constrained.
    """
    if content is not None and request.offered and not isinstance(form, CallForm):
        message = f"{content.field} with tools is not supported: no grammar is known for this model's tool calls"
        raise RequestError(f"{message}; leave one of them out", content.field)
    strict = any(tool.function.strict for tool in request.offered)
    is_constrained = request.must_call or strict or not request.parallel_tool_calls or content is not None
    if not isinstance(form, CallForm) or not request.offered or not is_constrained:
        if content is None or form is None or form.thinking is None:
            return content
        return AnswerGrammar(form).with_reasoning(content, reasoning())
    if content is not None and request.structured_outputs is not None and request.must_call:
        message = "structured_outputs and tool_choice both constrain the answer, expected one of them"
        raise RequestError(message, "structured_outputs")
    calling = Calling(
        tools=[_offered_call(tool, must=request.must_call) for tool in _callable(request)],
        must=request.must_call,
        several=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
        content=content,
    )
    grammar = CallGrammar(form).grammar_for(calling, reasoning())
    check_end(grammar, ignore_eos=request.ignore_eos)
    return grammar


def _callable(request: ChatRequest) -> tuple[Tool, ...]:
    choice = request.tool_choice
    if not isinstance(choice, NamedTool):
        return request.offered
    return tuple(tool for tool in request.offered if tool.function.name == choice.function.name)[:1]


def _offered_call(tool: Tool, *, must: bool) -> OfferedCall:
    function = tool.function
    strict = bool(function.strict)
    if not must and not strict:
        return OfferedCall(function.name, None, strict)
    return OfferedCall(function.name, NO_PARAMETERS if function.parameters is None else function.parameters, strict)
