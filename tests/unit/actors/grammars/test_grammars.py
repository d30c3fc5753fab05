"""Grammars are compiled once, follow texts and drafts, and mask logits."""

import random
from itertools import product

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from actors.grammars import GrammarCompiler, TextGrammar, unpacked
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, chain_of, paths_of
from cluster.errors import GrammarError
from protos.draft_tree import DraftTree
from protos.messages import TokenRules
from tests.unit.actors.grammars.languages import END, TOKENS, agrees, allowed_by, small_vocabulary, tokens_in
from tests.unit.actors.sampling.processor_opens import opened
from tests.unit.trees import grown

AB = LLMatcher.grammar_from_regex("ab")
BAD = LLMatcher.grammar_from_regex("(a")


def test_a_grammar_is_compiled_once_and_each_text_follows_it_from_its_beginning():
    compiler = GrammarCompiler(small_vocabulary())
    first = compiler.follow(AB)
    first.advance([0])
    assert tokens_in(compiler.follow(AB).masks([()])[0]) == {0}
    assert tokens_in(first.masks([()])[0]) == {1}
    assert compiler.begin(AB) is compiler.begin(AB)


def test_the_most_recently_used_are_kept():
    compiler = GrammarCompiler(small_vocabulary(), max_cached=2)
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
def test_an_unsatisfiable_grammar_is_refused_each_time(grammar, why):
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


# ---------------------------------------------------------------- masks along texts and drafts


LANGUAGES = {
    "(ab?c|ba){1,3}": ["".join(word) for count in (1, 2, 3) for word in product(("abc", "ac", "ba"), repeat=count)],
    "a{2,5}": ["a" * count for count in range(2, 6)],
    "cab|cabbc|b": ["cab", "cabbc", "b"],
}


def grammar(pattern: str) -> TextGrammar:
    return GrammarCompiler(small_vocabulary()).follow(LLMatcher.grammar_from_regex(pattern))


def texts_of(language: list[str], rng: random.Random, count: int) -> list[list[int]]:
    """Draws random walks through the language, some to its end and one token beyond."""
    found = []
    for _ in range(count):
        text: list[int] = []
        for _ in range(rng.randrange(8)):
            text.append(rng.choice(sorted(allowed_by(language, text) or {END})))
        found.append(text)
    return found


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_equal_an_exhaustive_check_along_a_text_and_all_draft_paths(pattern):
    """The draft leaves the text's position unchanged."""
    language = LANGUAGES[pattern]
    rng = random.Random(2)
    broken = 0
    for text in texts_of(language, rng, 60):
        followed = grammar(pattern)
        for end in range(len(text) + 1):
            followed.advance(text[max(0, end - 1) : end])
            assert agrees(followed.masks([()])[0], language, text[:end])
        paths = paths_of(grown(rng, 12, len(TOKENS)))
        for _ in range(2):
            found = followed.masks(paths)
            assert all(agrees(mask, language, (*text, *path)) for mask, path in zip(found, paths, strict=True))
            broken += found.count(None)
    assert broken > 100, "hardly a path broke the grammar: this showed little"


def test_a_path_past_the_end_breaks_the_grammar_only_for_itself():
    paths = paths_of(DraftTree((0, END, 0, 1), (-1, 0, 1, 0)))
    found = grammar("a(b|)").masks(paths)
    assert [tokens_in(mask) for mask in found] == [{0, 3}, {1, END}, None, None, {END}]


def test_a_text_that_broke_its_grammar_is_unconstrained():
    followed = grammar("ab")
    followed.advance([2])
    assert followed.masks([(), (0,)]) == [None, None]


def test_a_path_that_takes_too_much_work_ends_there_and_leaves_the_text_and_other_paths_alone():
    """Deep in an ambiguous text, the step exceeds its fuel; earlier positions stay within it."""
    limits = LLParserLimits(step_max_items=60, verbose_errors=False)
    lark = 'start: x\nx: "a" x "a" | "a" x "b" | "a" x | "a" x x | "a"'
    matcher = LLMatcher(small_vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
    followed = TextGrammar(matcher, [END])
    deep = tuple([0] * 12)
    paths = [(), *[deep[: end + 1] for end in range(len(deep))], (0, 1)]
    found = [tokens_in(mask) for mask in followed.masks(paths)]
    assert found[0] == {0}
    assert {END} in found, "nothing took too much work: this showed nothing"
    assert tokens_in(followed.masks([()])[0]) == found[0]


# ---------------------------------------------------------------- masks on logits


COMPILER = GrammarCompiler(small_vocabulary())
VOCABULARY = len(TOKENS)
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
ABC = LLMatcher.grammar_from_regex("a(b|c)*")


def left(row):
    return {token for token in range(VOCABULARY) if not row[token].isneginf()}


def test_rows_of_a_block_keep_what_the_grammar_allows_after_their_paths():
    chain = chain_of(opened(grammar=ABC), (*PROCESSOR_FACTORIES, COMPILER.masking))
    draft = DraftTree((0, 0, 1), (-1, 0, 0))
    found = chain.apply(LOGITS, paths_of(draft))
    assert [left(row) for row in found] == [{0, 3, 5}, {1, 2, 6, END}, set(range(VOCABULARY)), {1, 2, 6, END}]
    kept = ~found.isneginf()
    assert torch.equal(found[kept], LOGITS[kept])


def test_a_session_that_is_opened_in_the_middle_follows_what_was_generated():
    request = opened(prompt=(7,), grammar=ABC)
    chain = chain_of(request, (*PROCESSOR_FACTORIES, COMPILER.masking))
    chain.follow([7, 0, 1])
    assert left(chain.apply(LOGITS[:1], [()])[0]) == {1, 2, 6, END}


def test_the_grammar_decides_if_other_rules_exclude_every_token():
    rules = TokenRules(allowed=(1,))
    chain = chain_of(
        opened(grammar=LLMatcher.grammar_from_regex("a|c"), rules=rules), (*PROCESSOR_FACTORIES, COMPILER.masking)
    )
    found = chain.apply(LOGITS[:1], [()])[0]
    assert left(found) == {0, 2}
    assert found[0] == found[2] == 0


def test_logits_of_padding_rows_are_forbidden():
    """A drafter computes logits for all rows of an embedding; the grammar knows only the tokens."""
    chain = chain_of(opened(grammar=LLMatcher.grammar_from_regex("a|c")), (COMPILER.masking,))
    assert left(chain.apply(torch.zeros(1, LOGITS.shape[1] + 300), [()])[0]) == {0, 2}


def test_bits_are_unpacked_up_to_the_vocabulary_size():
    for width in (1, 8, 9, 31, 33, 100):
        allowed = torch.rand(3, width, generator=torch.Generator().manual_seed(width)) < 0.5
        masks = [
            bytes(sum(int(bit) << at for at, bit in enumerate(row[start : start + 8])) for start in range(0, width, 8))
            for row in allowed
        ]
        found = unpacked([*masks, None], torch.zeros(4, width))
        assert torch.equal(found[:3], allowed)
        assert found[3].all()
