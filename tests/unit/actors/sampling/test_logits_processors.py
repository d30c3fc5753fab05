"""Compares each logits processor with a simple reference, for any path of any tree."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from actors.sampling.logits_processors import ProcessorChain, chain_of, paths_of
from protos.draft_tree import DraftTree
from protos.messages import Open, Sampling, TokenRules
from tests.unit.actors.sampling.processor_opens import opened
from tests.unit.trees import trees

VOCABULARY = 12
TOKEN = st.integers(0, VOCABULARY - 1)
TEXT = st.lists(TOKEN, max_size=6).map(tuple)
PROMPT = st.lists(TOKEN, min_size=1, max_size=4).map(tuple)
TREE = trees(VOCABULARY)
STOPS = (5, 8)
BIAS = st.dictionaries(TOKEN, st.floats(-100, 100), min_size=1, max_size=5)
WORDS = st.sets(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)
RULES = st.builds(
    TokenRules,
    logit_bias=BIAS.map(lambda bias: tuple(bias.items())),
    allowed=st.sets(TOKEN).map(tuple),
    bad_words=st.just(()) | WORDS,
    min_len=st.integers(0, 12),
)
SAMPLINGS = st.builds(
    Sampling,
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
)


def some_logits(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def a_chain(request: Open, generated: tuple[int, ...]) -> ProcessorChain:
    chain = chain_of(request)
    assert chain is not None, "the request asks for something"
    chain.follow((*request.tokens, *generated))
    return chain


def by_transformers(processor, logits: Tensor, prompt, generated, draft: DraftTree) -> Tensor:
    """Applies transformers' processor row by row, given only the text before each row."""
    rows = [
        processor(torch.tensor([[*prompt, *generated, *path]]), row.unsqueeze(0).clone())[0]
        for row, path in zip(logits, paths_of(draft), strict=True)
    ]
    return torch.stack(rows)


@given(PROMPT, TEXT, TREE, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalties_are_those_of_openai(prompt, generated, tree, frequency, presence):
    """Its formula, with counts of generated tokens alone."""
    logits = some_logits(len(tree) + 1)
    sampling = Sampling(frequency_penalty=frequency or 1.0, presence_penalty=presence)
    found = a_chain(opened(sampling, prompt), generated).apply(logits, paths_of(tree))
    for row, path in enumerate(paths_of(tree)):
        text = (*generated, *path)
        for token in range(VOCABULARY):
            count = text.count(token)
            expected = logits[row, token] - count * sampling.frequency_penalty - (count > 0) * presence
            assert found[row, token] == pytest.approx(float(expected), abs=1e-5)


ALLOWED = st.sets(TOKEN, min_size=1, max_size=VOCABULARY - 1)
NO_TOKEN = (VOCABULARY + 1,)  # stands for the prompt, which begins no bad word, as in vLLM
LIKE_TRANSFORMERS: dict[str, Any] = {  # Open changes and transformers' processor, by drawn parameter
    "repetition penalty": (
        st.floats(0.1, 3).filter(lambda penalty: penalty != 1),
        lambda penalty, prompt: ({"sampling": Sampling(repetition_penalty=penalty)}),
        lambda penalty, prompt: RepetitionPenaltyLogitsProcessor(penalty),
    ),
    "logit bias": (
        BIAS,
        lambda bias, prompt: {"rules": TokenRules(logit_bias=tuple(bias.items()))},
        lambda bias, prompt: SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
    ),
    "bad words": (
        WORDS,
        lambda words, prompt: {"rules": TokenRules(bad_words=words)},
        lambda words, prompt: NoBadWordsLogitsProcessor([list(word) for word in words]),
    ),
    "allowed tokens": (
        ALLOWED,
        lambda allowed, prompt: {"rules": TokenRules(allowed=tuple(allowed))},
        lambda allowed, prompt: SuppressTokensLogitsProcessor([t for t in range(VOCABULARY) if t not in allowed]),
    ),
    "min tokens": (
        st.integers(1, 9),
        lambda least, prompt: {"rules": TokenRules(min_len=len(prompt) + least), "stop_ids": STOPS},
        lambda least, prompt: MinNewTokensLengthLogitsProcessor(len(prompt), least, list(STOPS)),
    ),
}


@pytest.mark.parametrize("name", LIKE_TRANSFORMERS)
@given(PROMPT, TEXT, TREE, st.data())
def test_a_processor_equals_that_of_transformers(name, prompt, generated, tree, data):
    parameters, changes, processor = LIKE_TRANSFORMERS[name]
    drawn = data.draw(parameters)
    logits = some_logits(len(tree) + 1)
    chain = a_chain(opened(prompt=prompt, **changes(drawn, prompt)), generated)
    known = NO_TOKEN if name == "bad words" else prompt
    expected = by_transformers(processor(drawn, prompt), logits, known, generated, tree)
    torch.testing.assert_close(chain.apply(logits, paths_of(tree)), expected)


@given(SAMPLINGS, RULES, PROMPT, TEXT, TREE, st.data())
def test_a_row_depends_on_its_text_alone(sampling, rules, prompt, generated, tree, data):
    """However the text was decided, whatever else is in the block: bit for bit, or speculation would change tokens."""
    request = opened(sampling, prompt, rules=rules, stop_ids=STOPS)
    logits = some_logits(len(tree) + 1)
    chain = chain_of(request)
    cut = data.draw(st.integers(0, len(generated)))
    chain.follow((*prompt, *generated[:cut]))
    chain.apply(logits, paths_of(tree))  # an earlier step must leave no state
    chain.follow((*prompt, *generated))
    together = chain.apply(logits, paths_of(tree))
    for row, path in enumerate(paths_of(tree)):
        alone = a_chain(request, (*generated, *path)).apply(logits[row : row + 1], [()])
        assert torch.equal(together[row], alone[0])


def test_masks_come_before_bias_and_bias_before_penalties():
    """Penalties apply to biased logits, and a bias never restores a forbidden token."""
    rules = TokenRules(logit_bias=((1, 10.0), (2, 100.0)), allowed=(1, 3))
    chain = a_chain(opened(Sampling(repetition_penalty=2.0), rules=rules), (1,))
    row = chain.apply(torch.zeros(1, VOCABULARY), [()])[0]
    assert row[[1, 3]].tolist() == [5.0, 0.0]
    assert row.isneginf().sum() == VOCABULARY - 2


def test_a_plain_request_has_no_processors():
    assert chain_of(opened(Sampling(temperature=0.3, top_k=4, top_p=0.9, min_p=0.1), stop_ids=STOPS)) is None


def test_logits_of_any_width_are_copied_before_they_are_changed():
    """Log probabilities need the original logits."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(1, VOCABULARY, dtype=dtype)
        a_chain(opened(rules=TokenRules(logit_bias=((1, 1.0),))), ()).apply(logits, [()])
        assert not logits.any()
