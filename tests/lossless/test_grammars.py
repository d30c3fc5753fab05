"""Texts under a grammar equal those of non-speculative decoding, or follow its distribution, for any drafter."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, TokenizerWrapper
from llguidance import LLTokenizer as Vocabulary

from actors.grammars import GrammarCompiler
from protos.messages import Acceptance, Sampling
from tests.lossless.parts import EOS, Setting
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, SESSIONS, p_value_of
from tests.lossless.test_distribution import TARGET as FEW_TARGET
from tests.lossless.test_reference_loop import DRAFT, NEW_TOKENS, TARGET, VOCABULARY
from tests.lossless.test_trees import into_a_tree
from tests.lossless.world import World, accepted, calm, lossy_delays, near_patience, run_worlds, texts

WRITTEN = ["a", "b", "c", "(", ")", ",", *map("".join, itertools.product("abc(),", "abc(),"))]
LETTERS = ("<end>", *WRITTEN[: VOCABULARY - 1])
FEW_LETTERS = ("<end>", "a", "b", "ab")
LISTS = LLMatcher.grammar_from_lark('start: list\nlist: "(" item ("," item){2,} ")"\nitem: list | /[abc]{1,3}/')
WORDS = r"(a{1,2}|b){2,4}"
WORLDS = 3
AT_ONCE = 4
FEW_PAGES = 15  # shared by all sessions; one session may need 14


class _Alphabet:
    """The interface that `TokenizerWrapper` expects."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)

    def __init__(self, letters: Sequence[str]) -> None:
        self._letters = letters
        self.tokens = [letter.encode() for letter in letters]

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode()
        return [self._letters.index(letter) for letter in whole if letter in self._letters]


@functools.cache
def compiler(letters: Sequence[str]) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TokenizerWrapper(_Alphabet(letters)), eos_token=[EOS]))


SETTING = Setting(
    TARGET,
    DRAFT,
    Acceptance.COUPLED,
    calm,
    5,
    NEW_TOKENS,
    ahead=4,
    grammar=LISTS,
    grammars=compiler(LETTERS),
)


def worlds(setting: Setting) -> list[World]:
    return run_worlds(setting, AT_ONCE, [(1 + seed, 7, 8) for seed in range(WORLDS)])


@functools.cache
def without_drafts(sampling: Sampling) -> list[tuple[int, ...]]:
    return texts(worlds(replace(SETTING, draft_tokens=0, sampling=sampling)))


def keeps_to_lists(text: tuple[int, ...]) -> bool:
    """Returns whether a text is a list, possibly truncated at the length limit."""
    written = "".join(LETTERS[token] for token in text if token != EOS)
    while (shorter := re.sub(r"\((\[\]|[abc]{1,3})(,(\[\]|[abc]{1,3}))*\)", "[]", written)) != written:
        written = shorter
    if text[-1] == EOS:
        return written == "[]"
    return len(text) == NEW_TOKENS and re.fullmatch(r"(\((\[\]|[abc]{1,3}|,)*)*|\[\]", written) is not None


SAMPLINGS = [
    pytest.param(Sampling(temperature=0.0), id="greedy"),
    pytest.param(Sampling(temperature=0.9), id="coupled"),
    pytest.param(Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.5), id="penalties"),
    pytest.param(Sampling(temperature=1.0, top_k=2), id="top-k"),
]


@pytest.mark.parametrize(
    ("schedule", "pages"),
    [
        pytest.param(calm, 4096, id="calm"),
        pytest.param(lossy_delays, FEW_PAGES, id="stormy with preemption"),
        pytest.param(near_patience, 4096, id="near patience"),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chains_and_trees_give_the_text_of_non_speculative_decoding(sampling, schedule, pages):
    altered = None if schedule is near_patience else into_a_tree(prompt_len=3)
    made = worlds(replace(SETTING, schedule=schedule, sampling=sampling, pages=pages, altered=altered))
    assert texts(made) == without_drafts(sampling)
    assert accepted(made) > 10, "too few drafts, so this proves nothing"
    preempted = sum(world.verification.admission.preempted for world in made)
    assert preempted or pages > FEW_PAGES or sampling.greedy  # greedy texts are short


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_text_follows_its_grammar(sampling):
    assert all(keeps_to_lists(text) for text in without_drafts(sampling))
    free = worlds(replace(SETTING, grammar="", draft_tokens=0, sampling=sampling))
    assert not all(keeps_to_lists(text) for text in texts(free)), "texts follow it anyway"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_that_knows_the_grammar_has_more_tokens_accepted(sampling):
    unmasked = worlds(replace(SETTING, sampling=sampling, masks_drafts=False))
    assert texts(unmasked) == without_drafts(sampling)
    assert accepted(worlds(replace(SETTING, sampling=sampling))) > 1.2 * accepted(unmasked)


def masked_distribution(setting: Setting) -> dict[tuple[int, ...], float]:
    """Returns the probability of each continuation, renormalized over the allowed tokens at each position."""
    found: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(setting.vocabulary), repeat=setting.new_tokens):
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        followed = setting.grammars.follow(setting.grammar)
        last = setting.prompt[-1]
        probability = 1.0
        for token in tokens[:end]:
            bits = np.unpackbits(np.frombuffer(followed.masks([()])[0], np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[: setting.vocabulary].copy()).bool()
            if not allowed[token]:
                probability = 0.0
                break
            row = setting.target_logits[last].double().masked_fill(~allowed, -torch.inf)
            probability *= float(torch.softmax(row, dim=-1)[token])
            followed.advance([token])
            last = token
        if probability:
            found[tokens[:end]] = probability
    return found


@pytest.mark.parametrize("masks_drafts", [True, False], ids=["it knows", "it does not"])
@pytest.mark.parametrize("drafter", ["good", "bad", "eos_heavy"])
def test_under_rejection_sampling_the_distribution_is_the_targets_among_allowed_tokens(drafter, masks_drafts):
    setting = Setting(
        FEW_TARGET,
        DRAFTERS[drafter],
        Acceptance.REJECTION,
        calm,
        new_tokens=4,
        grammar=LLMatcher.grammar_from_regex(WORDS),
        grammars=compiler(FEW_LETTERS),
        masks_drafts=masks_drafts,
    )
    world = World(setting, SESSIONS, seed=11)
    samples = world.run()
    exact = masked_distribution(setting)
    assert abs(sum(exact.values()) - 1) < 1e-9
    assert p_value_of(exact, samples) > FALSE_ALARM
    assert world.drafted > SESSIONS / 5
