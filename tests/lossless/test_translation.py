"""Tests drafts with another tokenizer: random pairs of toy tokenizers commit the text of the target alone."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.drafting.translation import TextTokens, Translator
from protos.messages import Acceptance, Sampling
from tests.lossless.parts import Setting, texts_in_lock_step
from tests.lossless.test_grammars import LETTERS, LISTS, compiler
from tests.lossless.test_grammars import SETTING as GRAMMATICAL
from tests.lossless.world import World, calm, lossy_delays

CHARACTERS = [character.encode() for character in "ab é日"]
BYTES = sorted({bytes([byte]) for character in CHARACTERS for byte in character})
CONTROLS = 2  # ids without text; the first one ends texts
SESSIONS = 4
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.7), Sampling())


def toy_tokens(pieces: Sequence[bytes], controls: int = CONTROLS) -> TextTokens:
    """Returns a tokenizer that greedily matches the longest piece."""
    ids = {piece: token for token, piece in enumerate(pieces, controls)}
    longest = max(map(len, pieces))

    def encode(text: str) -> list[int]:
        rest = text.encode()
        found = []
        while rest:
            piece = next(rest[:size] for size in range(longest, 0, -1) if rest[:size] in ids)
            found.append(ids[piece])
            rest = rest[len(piece) :]
        return found

    return TextTokens([b""] * controls + list(pieces), encode)


longer_pieces = st.lists(
    st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=3).map(b"".join), max_size=8, unique=True
)
tokenizers = longer_pieces.map(lambda longer: toy_tokens(list(dict.fromkeys([*BYTES, *longer]))))


def logits(tokens: TextTokens, seed: int) -> torch.Tensor:
    size = len(tokens.pieces)
    return 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def a_setting(target: TextTokens, draft: TextTokens, seed: int) -> Setting:
    return Setting(
        logits(target, seed),
        logits(draft, seed + 1),
        Acceptance.COUPLED,
        lossy_delays,
        draft_tokens=4,
        new_tokens=12,
        prompt=(1, 3, 2, 4),
        translator=Translator(target, draft),
    )


prompts = st.lists(st.integers(0, 12), max_size=4).map(tuple)  # may contain ids that the draft does not have


@settings(deadline=None, max_examples=60)
@given(tokenizers, tokenizers, st.integers(0, 1000), st.sampled_from(SAMPLINGS), prompts)
def test_random_pairs_of_tokenizers_commit_the_targets_text(
    target: TextTokens, draft: TextTokens, seed: int, sampling: Sampling, draft_prompt: tuple[int, ...]
) -> None:
    setting = replace(a_setting(target, draft, seed), sampling=sampling, draft_prompt=draft_prompt)
    alone = replace(setting, translator=None, draft_logits=setting.target_logits)
    assert World(setting, SESSIONS, seed).run() == texts_in_lock_step(alone, SESSIONS, seed)


@functools.cache
def copycats() -> Setting:
    """Returns a pair whose models spell the same cyclic alphabet with different tokens."""
    pieces = [bytes([byte]) for byte in b"abcdefgh"]
    target = toy_tokens([*pieces, b"ab", b"cd", b"efg"])
    draft = toy_tokens([*pieces[::-1], b"bc", b"de", b"fgh"])

    def following(tokens: TextTokens) -> torch.Tensor:
        table = torch.full((len(tokens.pieces), len(tokens.pieces)), -4.0)
        for token, piece in enumerate(tokens.pieces):
            last = b"abcdefgh".index(piece[-1:]) if piece else 7
            text = (b"abcdefgh" * 2)[last + 1 :][:6].decode()
            table[token, tokens.encode(text)[0]] = 6.0
        return table

    return replace(
        a_setting(target, draft, 0),
        target_logits=following(target),
        draft_logits=following(draft),
        new_tokens=40,
        schedule=calm,
        sampling=SAMPLINGS[0],
    )


@pytest.mark.parametrize("lock_step", [False, True])
def test_a_draft_of_the_same_text_is_accepted(lock_step: bool) -> None:
    world = World(replace(copycats(), lock_step=lock_step), SESSIONS, 1)
    world.run()
    assert world.accepted > 0.7 * world.drafted > 0
    assert lock_step or world.drafting.counts["guess_hit"] > 0


def test_a_draft_continues_its_own_prompt() -> None:
    """The draft's prompt ends at another letter than the target's, so only the first block is wrong."""
    setting = replace(copycats(), lock_step=True, new_tokens=12)
    assert setting.translator is not None
    right, wrong = [tuple(setting.translator.draft.encode(text)) for text in ("ab", "de")]
    accepted = []
    for draft_prompt in ((), right, wrong):
        world = World(replace(setting, prompt=(2, 3), draft_prompt=draft_prompt), SESSIONS, 1)
        world.run()
        accepted.append(world.accepted)
    assert accepted[0] == accepted[1] > accepted[2]


@pytest.mark.parametrize("draft_prompt", [(), (2, 4, 3)])
def test_shared_tokens_use_the_targets_noise(draft_prompt: tuple[int, ...]) -> None:
    """One flat distribution: only a draft that knows the target's noise predicts its draws."""
    tokens = toy_tokens([bytes([byte]) for byte in b"abcdefgh"])
    other = toy_tokens([bytes([byte]) for byte in b"hgfedcba"])
    flat = torch.zeros(len(tokens.pieces), len(tokens.pieces))
    flat[:, :CONTROLS] = -9.0
    setting = replace(
        a_setting(tokens, other, 0), target_logits=flat, draft_logits=flat, schedule=calm, new_tokens=40, lock_step=True
    )
    setting = replace(setting, draft_prompt=draft_prompt)
    translated, own = [World(each, SESSIONS, 1) for each in (setting, replace(setting, translator=None))]
    assert translated.run() == own.run()
    assert translated.accepted > 0.9 * own.accepted > 0.4 * own.drafted


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_grammars_hold_for_drafts_that_ignore_them(sampling: Sampling) -> None:
    pieces = [letter.encode() for letter in LETTERS[1:]]
    target, draft = toy_tokens(pieces, 1), toy_tokens(pieces[:7] + pieces[20:6:-1], 1)
    setting = replace(
        GRAMMATICAL,
        draft_logits=logits(draft, 3),
        translator=Translator(target, draft),
        schedule=lossy_delays,
        sampling=sampling,
        grammar=LISTS,
        grammars=compiler(LETTERS),
    )
    alone = replace(setting, translator=None, draft_logits=setting.target_logits)
    assert World(setting, SESSIONS, 2).run() == texts_in_lock_step(alone, SESSIONS, 2)


def test_rejection_sampling_gets_no_translated_drafts() -> None:
    world = World(replace(copycats(), acceptance=Acceptance.REJECTION, sampling=Sampling()), SESSIONS, 1)
    world.run()
    assert world.drafted == 0
