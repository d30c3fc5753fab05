"""Tests response formats as grammars, and refusals that name the field."""

import asyncio
import json
from concurrent.futures import Future
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest
from llguidance import LLMatcher

from actors.grammars import GrammarCompiler, grammar_vocabulary
from cluster.errors import CapacityError, RequestError
from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.grammars import GrammarCheck, RequestedGrammar, content_grammar
from serve_app.api.request_schemas import ChatRequest, CompletionRequest
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, asgi_front
from tests.byte_tokenizer import byte_tokenizer
from tests.unit.serve_app.api.sample_requests import refusal_of

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMA_FIELD = "response_format.json_schema.schema"
TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(grammar_vocabulary(TOKENIZER, [TOKENIZER.eos_token_id]))


def asked(**fields: Any) -> RequestedGrammar | None:
    body = json.dumps({"model": "toy", "prompt": "x", **fields}).encode()
    request = parse(CompletionRequest, body, RequestBounds())
    return content_grammar(request.response_format, request.structured_outputs)


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, **more}}}


def takes(grammar: RequestedGrammar | None, text: str) -> bool:
    """Returns whether the grammar allows exactly this text, token by token."""
    followed = COMPILER.follow(grammar.text)
    tokens = [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]
    for token in tokens:
        (mask,) = followed.masks([()])
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return False
        followed.advance([token])
    return True


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        pytest.param(by_schema(POINT), ['{"x":1,"y":null}', '{ "x": 1,\n "y": -2}'], ['{"x":1}', "[]"], id="schema"),
        pytest.param(by_schema(POINT, strict=True), ['{"x":1,"y":2}'], ['{"x":1,"y":2,"z":3}'], id="strict"),
        pytest.param(by_schema(POINT, strict=False), ['{"x":1,"y":2}'], ['{"x":1.5,"y":2}'], id="not strict"),
        pytest.param({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, {}]}'], ["[]", "1"], id="object"),
        pytest.param({"structured_outputs": {"json": POINT}}, ['{"x":1,"y":2}'], ["{}"], id="vLLM's schema"),
        pytest.param({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x":1,"y":2}'], ["{}"], id="as text"),
        pytest.param({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"], id="vLLM's object"),
        pytest.param({"structured_outputs": {"regex": "a{2}|b"}}, ["aa", "b"], ["a", "aaa", "c"], id="regex"),
        pytest.param(
            {"structured_outputs": {"choice": ["yes", "yes and no", 'a "b"\n', "né"]}},
            ["yes", "yes and no", 'a "b"\n', "né"],
            ["no", "yes and", '"yes"'],
            id="choice",
        ),
        pytest.param(
            {"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, ["c", "aacbb"], ["aacb", ""], id="lark"
        ),
        pytest.param(
            {"structured_outputs": {"grammar": 'root ::= "a" root "b" | "c"'}}, ["c", "aacbb"], ["aacb"], id="gbnf"
        ),
        pytest.param(
            {"structured_outputs": {"grammar": ' \n\t%llguidance {}\n\n start\t: x\nx: "a"'}},
            ["a"],
            ["x"],
            id="lark with spaces",
        ),
        pytest.param({"structured_outputs": {"grammar": 'x: "a"\n\t start \t: x'}}, ["a"], ["x"], id="lark later"),
        pytest.param(
            {"structured_outputs": {"grammar": "\n" * 65_000 + 'root ::= "a"'}}, ["a"], ["aa"], id="gbnf far below"
        ),
        pytest.param(
            {"structured_outputs": {"grammar": 'root ::= "start:" restart\nrestart ::= "%llguidance"'}},
            ["start:%llguidance"],
            ["start"],
            id="gbnf with lark's words",
        ),
        pytest.param(
            {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}},
            ['{"x":1,"y":2}'],
            ['{"x": 1,"y":2}'],
            id="no whitespace",
        ),
        pytest.param(
            {"structured_outputs": {"json": POINT, "whitespace_pattern": "_"}},
            ['{"x":_1,"y":2}'],
            ['{"x": 1,"y":2}'],
            id="whitespace of one's own",
        ),
    ],
)
def test_answers_match_the_requested_format(fields, good, bad):
    grammar = asked(**fields)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


def test_whitespace_in_json_is_limited():
    grammar = asked(response_format={"type": "json_object"})
    assert takes(grammar, "{" + " " * 20 + "}")
    assert not takes(grammar, "{" + " " * 21 + "}")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_no_grammar_without_a_format(fields):
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "p", "schema": {}}}}, "response_format"),
        (by_schema([]), SCHEMA_FIELD),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}}, SCHEMA_FIELD),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, None),
        (by_schema({"enum": ["x" * 100_000]}), SCHEMA_FIELD),
        (by_schema({"const": 2**64}), SCHEMA_FIELD),
        ({"structured_outputs": {"json": {"minimum": -(2**63) - 1}}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, None),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "1"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"guided": "x"}}, "structured_outputs.guided"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "x" * 100_000}}, "structured_outputs.grammar"),
        (by_schema(POINT) | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_invalid_formats_are_refused(fields, field):
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    named = caught.value.field or ""
    assert named == field or (field is None and named.startswith(("response_format", "structured_outputs")))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (by_schema({"type": "strin"}), "strin"),
        (by_schema({"not": {"type": "string"}}), "not"),
        (by_schema({"$ref": "#/$defs/missing"}), "missing. does not exist"),
        (by_schema({"$ref": "#"}), "schema: no text meets this: .* a \\$ref leads only to itself"),
        (by_schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}), "leads only to itself"),
        ({"structured_outputs": {"grammar": "start: start"}}, "leads only to itself"),
        (by_schema({"type": "string", "pattern": "(a"}), "unclosed group"),
        (by_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "look-around"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "missing"),
    ],
)
async def test_unsupported_grammars_are_refused_with_the_reason(fields, why):
    grammar = asked(**fields)
    with refusal_of(grammar.field, why):
        await GrammarCheck(COMPILER).check(grammar)


async def test_supported_grammars_pass_unless_the_model_has_none():
    grammar = asked(**by_schema(POINT))
    await GrammarCheck(COMPILER).check(grammar)
    with refusal_of(SCHEMA_FIELD):
        await GrammarCheck(None).check(grammar)


class SlowCompiler(GrammarCompiler):
    """Compiler that never finishes, for one request at a time."""

    def __init__(self) -> None:
        self._is_busy = False

    def begin(self, grammar: str) -> Future[LLMatcher]:
        future = Future[LLMatcher]()
        if not self._is_busy:
            future.set_running_or_notify_cancel()
        self._is_busy = True
        return future


async def test_a_slow_grammar_is_refused_and_those_behind_it_may_return():
    check = GrammarCheck(SlowCompiler(), limit_s=0.01)
    grammar = asked(**by_schema(POINT))
    with refusal_of(SCHEMA_FIELD, "did not compile"):
        await check.check(grammar)
    with pytest.raises(CapacityError, match="try again later"):
        await check.check(grammar)


class HeldCompiler(GrammarCompiler):
    """Compiler that compiles nothing before its release."""

    def __init__(self) -> None:
        super().__init__(grammar_vocabulary(TOKENIZER, [TOKENIZER.eos_token_id]))
        self.compiled: list[str] = []
        self.release = Event()

    def _compile(self, grammar: str) -> LLMatcher:
        self.release.wait()
        self.compiled.append(grammar)
        return super()._compile(grammar)


async def test_grammars_of_refused_requests_are_not_compiled():
    """They would delay the grammars of later requests."""
    compiler = HeldCompiler()
    slow, refused, later = (asked(structured_outputs={"regex": text}) for text in "abc")
    impatient, patient = GrammarCheck(compiler, limit_s=0.01), GrammarCheck(compiler)
    try:
        with refusal_of("structured_outputs.regex", "did not compile"):
            await impatient.check(slow)
        same = [one.check(refused) for one in (impatient, patient)]
        assert [type(one) for one in await asyncio.gather(*same, return_exceptions=True)] == [CapacityError] * 2
    finally:
        compiler.release.set()
    await patient.check(later)
    assert compiler.compiled == [slow.text, later.text]
    await patient.check(refused)
    assert compiler.compiled[2:] == [refused.text]


def test_chats_take_the_same_fields():
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], **by_schema(POINT)}
    request = parse(ChatRequest, json.dumps(body).encode(), RequestBounds())
    assert takes(content_grammar(request.response_format, request.structured_outputs), '{"x":1,"y":2}')


class RecordingCodec(TextCodec):
    """Codec that records the threads on which it reads the vocabulary for grammars."""

    threads: list[Thread]

    def grammars(self) -> GrammarCompiler | None:
        self.threads.append(current_thread())
        return super().grammars()


async def test_the_vocabulary_is_read_off_the_event_loop() -> None:
    codec = RecordingCodec(TOKENIZER, (TOKENIZER.eos_token_id,))
    codec.threads = []
    async with asgi_front(codec) as front:
        front.plays([*front.emits("{}"), Ended(Finish.STOP)])
        for _ in range(2):
            body = {"model": MODEL, "prompt": "x", "response_format": {"type": "json_object"}}
            answer = await front.http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "{}"
    (thread,) = codec.threads
    assert thread is not main_thread()
