"""Masks on logits: what is forbidden is -inf, what is allowed is untouched, and something is always left."""

import torch
from llguidance import LLMatcher

from actors.grammars import GrammarCompiler, unpacked
from actors.sampling.processors import MAKERS, chain_of, paths_of
from protos.draft_tree import DraftTree
from protos.messages import TokenRules
from tests.unit.actors.grammars.languages import END, TOKENS, small_vocabulary
from tests.unit.actors.sampling.processor_opens import opened

COMPILER = GrammarCompiler(small_vocabulary())
VOCABULARY = len(TOKENS)
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
AB = LLMatcher.grammar_from_regex("a(b|c)*")


def left(row):
    return {token for token in range(VOCABULARY) if not row[token].isneginf()}


def test_rows_of_a_block_keep_what_the_grammar_allows_after_their_paths():
    chain = chain_of(opened(grammar=AB), (*MAKERS, COMPILER.masking))
    draft = DraftTree((0, 0, 1), (-1, 0, 0))
    found = chain.apply(LOGITS, paths_of(draft))
    assert [left(row) for row in found] == [{0, 3, 5}, {1, 2, 6, END}, set(range(VOCABULARY)), {1, 2, 6, END}]
    kept = ~found.isneginf()
    assert torch.equal(found[kept], LOGITS[kept])


def test_a_session_that_is_opened_in_the_middle_follows_what_was_generated():
    request = opened(prompt=(7,), grammar=AB)
    chain = chain_of(request, (*MAKERS, COMPILER.masking))
    chain.follow([7, 0, 1])
    assert left(chain.apply(LOGITS[:1], [()])[0]) == {1, 2, 6, END}


def test_where_other_rules_leave_nothing_the_grammar_decides():
    rules = TokenRules(allowed=(1,))
    chain = chain_of(opened(grammar=LLMatcher.grammar_from_regex("a|c"), rules=rules), (*MAKERS, COMPILER.masking))
    found = chain.apply(LOGITS[:1], [()])[0]
    assert left(found) == {0, 2}
    assert found[0] == found[2] == 0


def test_bits_are_unpacked_to_as_many_tokens_as_there_are():
    for width in (1, 8, 9, 31, 33, 100):
        allowed = torch.rand(3, width, generator=torch.Generator().manual_seed(width)) < 0.5
        masks = [
            bytes(sum(int(bit) << at for at, bit in enumerate(row[start : start + 8])) for start in range(0, width, 8))
            for row in allowed
        ]
        found = unpacked([*masks, None], torch.zeros(4, width))
        assert torch.equal(found[:3], allowed)
        assert found[3].all()
