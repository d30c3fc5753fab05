"""Grammars are compiled once, kept within bounds, and refused with a reason."""

import pytest
from llguidance import LLMatcher

from actors.grammars import GrammarCompiler
from cluster.errors import GrammarError
from tests.unit.actors.grammars.languages import small_vocabulary, tokens_in
from tests.unit.actors.sampling.processor_opens import opened

AB = LLMatcher.grammar_from_regex("ab")
BAD = LLMatcher.grammar_from_regex("(a")


def test_a_grammar_is_compiled_once_and_each_text_follows_it_from_its_beginning():
    compiler = GrammarCompiler(small_vocabulary())
    first = compiler.follow(AB)
    first.advance([0])
    assert tokens_in(compiler.follow(AB).masks([()])[0]) == {0}
    assert tokens_in(first.masks([()])[0]) == {1}
    assert compiler.begin(AB) is compiler.begin(AB)


def test_those_used_last_are_kept():
    compiler = GrammarCompiler(small_vocabulary(), kept=2)
    kept = compiler.begin(AB)
    lost = compiler.begin(LLMatcher.grammar_from_regex("a"))
    compiler.begin(AB)
    compiler.begin(LLMatcher.grammar_from_regex("b"))
    assert compiler.begin(AB) is kept
    assert compiler.begin(LLMatcher.grammar_from_regex("a")) is not lost


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        pytest.param(BAD, "unclosed group", id="a malformed pattern"),
        pytest.param(LLMatcher.grammar_from_lark("start: missing"), "unknown name", id="a name that is not there"),
        pytest.param(
            LLMatcher.grammar_from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems", id="not kept to"
        ),
        pytest.param(
            LLMatcher.grammar_from_json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
            "use anyOf, or options of different types",
            id="options that may match the same",
        ),
        pytest.param(LLMatcher.grammar_from_json_schema({"enum": []}), "Unsatisfiable", id="met by nothing"),
        pytest.param(LLMatcher.grammar_from_json_schema({"$ref": "#"}), "", id="refers to itself alone"),
        pytest.param("no grammar at all", "", id="not of the notation"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_each_time(grammar, why):
    compiler = GrammarCompiler(small_vocabulary())
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            compiler.follow(grammar)
        assert why in str(caught.value)
        assert compiler.fault(grammar) == str(caught.value)
    assert compiler.fault(AB) is None


def test_a_session_has_a_processor_if_it_has_a_grammar_and_a_drafter_does_without_a_bad_one():
    compiler = GrammarCompiler(small_vocabulary())
    assert compiler.masking(opened()) is None
    assert compiler.draft_masking(opened()) is None
    assert compiler.draft_masking(opened(grammar=BAD)) is None
    assert compiler.masking(opened(grammar=AB)) is not None
    assert compiler.draft_masking(opened(grammar=AB)) is not None
