"""Masks along texts and drafts are those that trying every word of a language gives."""

import random
from itertools import product

import pytest
from llguidance import LLMatcher, LLParserLimits

from actors.grammars import GrammarCompiler, TextGrammar
from actors.sampling.processors import paths_of
from protos.draft_tree import DraftTree
from tests.unit.actors.grammars.languages import END, TOKENS, agrees, allowed_by, small_vocabulary, tokens_in
from tests.unit.trees import grown

LANGUAGES = {
    "(ab?c|ba){1,3}": ["".join(word) for count in (1, 2, 3) for word in product(("abc", "ac", "ba"), repeat=count)],
    "a{2,5}": ["a" * count for count in range(2, 6)],
    "cab|cabbc|b": ["cab", "cabbc", "b"],
}


def grammar(pattern: str) -> TextGrammar:
    return GrammarCompiler(small_vocabulary()).follow(LLMatcher.grammar_from_regex(pattern))


def texts_of(language: list[str], rng: random.Random, count: int) -> list[list[int]]:
    """Random walks through the language, some of them to its end and one token beyond."""
    found = []
    for _ in range(count):
        text: list[int] = []
        for _ in range(rng.randrange(8)):
            text.append(rng.choice(sorted(allowed_by(language, text) or {END})))
        found.append(text)
    return found


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_are_what_trying_every_word_gives_wherever_a_text_has_got_to(pattern):
    language = LANGUAGES[pattern]
    for text in texts_of(language, random.Random(1), 40):
        followed = grammar(pattern)
        for end in range(len(text) + 1):
            followed.advance(text[max(0, end - 1) : end])
            assert agrees(followed.masks([()])[0], language, text[:end])


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_every_path_of_a_draft_tree_has_its_own_mask_and_the_text_is_where_it_was(pattern):
    language = LANGUAGES[pattern]
    rng = random.Random(2)
    broken = 0
    for text in texts_of(language, rng, 60):
        followed = grammar(pattern)
        followed.advance(text)
        paths = paths_of(grown(rng, 12, len(TOKENS)))
        for _ in range(2):
            found = followed.masks(paths)
            assert all(agrees(mask, language, (*text, *path)) for mask, path in zip(found, paths, strict=True))
            broken += found.count(None)
    assert broken > 100, "hardly a path broke the grammar: this showed little"


def test_a_path_that_goes_past_the_end_breaks_the_grammar_and_no_other_path():
    paths = paths_of(DraftTree((0, END, 0, 1), (-1, 0, 1, 0)))
    found = grammar("a(b|)").masks(paths)
    assert [tokens_in(mask) for mask in found] == [{0, 3}, {1, END}, None, None, {END}]


def test_a_text_that_broke_its_grammar_is_free():
    followed = grammar("ab")
    followed.advance([2])
    assert followed.masks([(), (0,)]) == [None, None]


def test_a_path_that_takes_too_much_work_ends_there_and_leaves_the_text_and_other_paths_alone():
    """Deep in a text of many readings: the step's fuel does not suffice there, and does before."""
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
