"""Tests the behavior that all drafting methods share: open, draft, follow verdicts, draft ahead, yield, and close.

The reference is teacher-forced: it computes the logits after a committed text and its draft tokens from scratch. A
lookup's reference allows only one token.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.attention.batch import never
from actors.drafters.heads.dflash.drafting import DFlashContext, load_dflash
from actors.drafters.heads.eagle.loading import EagleHead
from actors.drafters.heads.eagle.method import eagle_draft_model
from actors.drafters.heads.eagle.mtp import load_mtp
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.drafters.lookup.hybrid import HybridDraft
from actors.drafters.lookup.ngram import NgramDraft, look_up
from actors.drafters.lookup.suffix import SuffixIndex, SuffixLookup
from actors.drafters.model.sampling import DraftingLimits
from actors.sampling.gumbel import Purpose, gumbel_argmax, key
from cluster.config_sections import SuffixOptions
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import (
    ALL_TOKENS,
    DRAFTED,
    DRAWN,
    HEAD_VOCABULARY,
    LOGITS,
    PAGE_SIZE,
    REJECTION,
    RULES,
    SAMPLINGS,
    TOP_K,
    VOCABULARY,
    Following,
    MaskRunner,
    PrefixRunner,
    SpyRunner,
    WantedBlock,
    a_method,
    after_checks,
    are_beginnings,
    first,
    head_method,
    wanted_block,
)
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, Drive, checkpoint, loaded
from tests.unit.actors.drafters.heads.mtp_fixtures import deepseek, target_with
from tests.unit.cluster.samples import GREEDY, KEY

Tokens = tuple[int, ...]
EXACT = {"sampling": DRAWN, "acceptance": REJECTION}
LENGTH = 4  # of most test blocks


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of drafting method, with its reference."""

    make: Callable[..., Any]  # takes `pages` if `tight` is set
    logits: Callable[[Tokens, Tokens], Tensor]  # (vocabulary,), after a committed text and draft tokens
    text: Tokens
    width: int = 64  # maximum tokens per block
    states: int = 0  # width of the target states it reads
    tight: int = 0  # pages that suffice for only one session
    looks_up: bool = False
    foresees: bool = True  # whether a right lookahead block equals the block drafted after the verdict

    def greedy(self, text: Tokens, count: int) -> Tokens:
        found: Tokens = ()
        while len(found) < min(count, self.width):
            logits = self.logits(text, found)
            if not logits.isfinite().any():
                break
            found = (*found, int(logits.argmax()))
        return found

    def rows(self, text: Tokens) -> Tensor:
        """Returns the target's states of all tokens except the last; each depends on the text up to its token."""
        seeds = [Prefix(KEY, text[: end + 1]).hash % (1 << 31) for end in range(len(text) - 1)]
        return torch.stack([2 * torch.randn(self.states, generator=torch.Generator().manual_seed(s)) for s in seeds])


# ---------------------------------------------------------------- kinds

TOY_TEXT = (1, 2, 3, 4, 5, 1, 2, 6, 1, 2)
HEAD_TEXT = (5, 17, 3, 3, 60, 41, 9, 88, 2, 30, 31)


def one_hot(tokens: Tokens, place: int) -> Tensor:
    found = torch.full((VOCABULARY,), -torch.inf)
    if place < len(tokens):
        found[tokens[place]] = 0.0
    return found


def in_groups(text: Tokens, further: Tokens) -> Tensor:
    """Returns the mask runner's logits for a token followed by two masks."""
    at = len(further) % 3
    known = (*text, *further)[len(text) + len(further) - at - 1]
    return LOGITS[(known + at) % VOCABULARY]


def looked_up(text: Tokens, further: Tokens) -> Tensor:
    return one_hot(look_up(text, 9, 4, 1), len(further))


def by_suffix(text: Tokens, further: Tokens) -> Tensor:
    index = SuffixIndex(1)
    index.add(list(text))
    match = index.find(text, 4)
    for token in further:
        match = match.after(token)
    return one_hot(tuple(match.following)[:1], 0)


def by_prefix(text: Tokens, further: Tokens) -> Tensor:
    return PrefixRunner(scale=1.0).after((*text, *further))


def toy(runner: Callable[[], SpyRunner], logits: Callable[[Tokens, Tokens], Tensor], **options: Any) -> Kind:
    def make(pages: int = 64) -> Any:
        head = Following() if options.get("head") else None
        return a_method(runner(), pages=pages, **options | {"head": head})

    return Kind(make=make, logits=logits, text=TOY_TEXT, tight=5)


def hybrid() -> Kind:
    def make(pages: int = 64) -> HybridDraft:
        return HybridDraft(NgramDraft(4, 3), a_method(PrefixRunner(scale=1.0), pages=pages))

    def logits(text: Tokens, further: Tokens) -> Tensor:
        found = look_up(text, 9, 4, 3)
        return one_hot(found, len(further)) if found else by_prefix(text, further)

    return Kind(make=make, logits=logits, text=TOY_TEXT, tight=5, foresees=False)  # matches may change


def suffix() -> Kind:
    options = SuffixOptions(max_ngram=4, min_ngram=1, remembered_tokens=0)
    make = partial(SuffixLookup, options, lambda: 0.0)
    return Kind(make=make, logits=by_suffix, text=TOY_TEXT, looks_up=True)


def last_state(kind: str, load: Callable[..., Any], width: int) -> Kind:
    head = load(checkpoint(kind), TARGET, torch.float32, CPU, ALL_TOKENS)

    @torch.inference_mode()
    def logits(text: Tokens, further: Tokens) -> Tensor:
        state = found.rows(text)[-1:]
        for depth, token in enumerate((text[-1], *further)):
            output = head.predict_next(state, [token], depth)
            state = state if output.hidden is None else output.hidden
        return output.logits[0]

    make = partial(head_method, kind, checkpoint(kind))
    found = Kind(make=make, logits=logits, text=HEAD_TEXT, width=width, states=32, foresees=False)
    return found


def dflash() -> Kind:
    head = load_dflash(checkpoint("dflash"), TARGET, torch.float32, CPU, ALL_TOKENS)

    @torch.inference_mode()
    def logits(text: Tokens, further: Tokens) -> Tensor:
        context = DFlashContext()
        context.put(0, head.project(found.rows(text)))
        hidden = head.hidden([context], [text[-1]], [len(text) - 1])[0]
        return head.logits(hidden[1 + len(further) :])[0]

    make = partial(head_method, "dflash", checkpoint("dflash"))
    found = Kind(make=make, logits=logits, text=HEAD_TEXT, width=4, states=96, foresees=False)
    return found


def fed_states(head: EagleHead) -> Kind:
    """Returns the reference of a head fed with each token and the state before it, the target's state if known."""

    def make(pages: int = 64) -> Any:
        return eagle_draft_model(head, pages, PAGE_SIZE, DraftingLimits(TOP_K), DRAFTED, lambda: 0.0)

    @torch.inference_mode()
    def logits(text: Tokens, further: Tokens) -> Tensor:
        drive = Drive(head)
        read = drive.feed(torch.tensor(text[1:]), head.inputs(found.rows(text)), 0)
        for place, token in enumerate(further, len(text) - 1):
            read = drive.feed(torch.tensor([token]), read.hidden[-1:], place)
        whole = torch.full((HEAD_VOCABULARY,), -torch.inf)
        whole[head.token_ids] = read.logits[-1]
        return whole

    found = Kind(make=make, logits=logits, text=HEAD_TEXT, states=head.config.needs.width, tight=5, foresees=False)
    return found


def mtp(folder: Path) -> Kind:
    return fed_states(load_mtp(target_with(folder, deepseek()), torch.float32, CPU, ALL_TOKENS))


KINDS: dict[str, Callable[[Path], Kind]] = {
    "ngram": lambda _: Kind(make=lambda: NgramDraft(4, 1), logits=looked_up, text=TOY_TEXT, looks_up=True),
    "suffix": lambda _: suffix(),
    "draft model": lambda _: toy(partial(PrefixRunner, 1.0), by_prefix),
    "masks": lambda _: toy(MaskRunner, in_groups, masks=3),
    "recurrent head": lambda _: toy(SpyRunner, lambda text, further: LOGITS[(*text, *further)[-1]], head=True),
    "hybrid": lambda _: hybrid(),
    "medusa": lambda _: last_state("medusa", load_medusa, 5),
    "mlp_speculator": lambda _: last_state("mlp_speculator", load_mlp_speculator, 3),
    "dflash": lambda _: dflash(),
    "eagle1": lambda _: fed_states(loaded(checkpoint("eagle1"))),
    "eagle3": lambda _: fed_states(loaded(checkpoint("eagle3"))),
    "mtp": mtp,
}
READERS = ("medusa", "mlp_speculator", "dflash", "eagle1", "eagle3", "mtp")
CACHED = ("draft model", "masks", "recurrent head", "hybrid", "eagle1", "eagle3", "mtp")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    return cache(lambda name: KINDS[name](tmp_path_factory.mktemp("target")))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, kinds: Callable[[str], Kind]) -> Kind:
    return kinds(request.param)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names, indirect=True)


class Drafter:
    """New method with open sessions and the target states of their texts."""

    def __init__(self, kind: Kind, **options: Any) -> None:
        self.kind = kind
        self.method = kind.make(**options)

    def open(self, *wants: WantedBlock) -> "Drafter":
        for want in wants:
            self.method.open(replace(want.open, tokens=want.tokens))
            self.give(want)
        return self

    def give(self, want: WantedBlock, begin: int = 0, end: int | None = None) -> None:
        if self.kind.states:
            self.method.states(want.open.session, begin, self.kind.rows(want.tokens)[begin:end])

    def commit(self, want: WantedBlock, *tokens: int) -> WantedBlock:
        self.method.committed(want.open.session, tokens)
        later = want.after(*tokens)
        self.give(later, len(want.tokens) - 1)
        return later

    def draft(self, *wants: WantedBlock) -> list[Proposal]:
        found: list[Proposal] = self.method.draft([want.request for want in wants])
        return sorted(found, key=lambda each: [want.open.session for want in wants].index(each.session))

    def ahead(self, *wants: WantedBlock, interrupted: Callable[[], bool] = never) -> list[Proposal]:
        found: list[Proposal] = self.method.draft_ahead([want.ahead for want in wants], interrupted)
        return found


def fresh(kind: Kind, want: WantedBlock) -> Proposal:
    """Returns the block of a new method, opened with this text."""
    return Drafter(kind).open(want).draft(want)[0]


def equal(found: Proposal, expected: Proposal) -> bool:
    """Returns whether blocks are equal up to rounding of probabilities.

    A block made without a forward pass may be shorter.
    """
    if found.is_at_once:
        expected = first(expected, len(found.tokens))
    trees = (found.tree, expected.tree)
    same = [(tree.tokens, tree.parents, tree.probs and tree.probs.token_ids) for tree in trees]
    weights = [torch.tensor(tree.probs.weights if tree.probs else ()) for tree in trees]
    places = [(each.session, each.base_len, each.prefix_hash) for each in (found, expected)]
    return places[0] == places[1] and same[0] == same[1] and torch.allclose(*weights, rtol=0.0, atol=2)


def is_idle(method: Any) -> bool:
    return bool(getattr(method, "is_idle", True))


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("changes", [{}, EXACT], ids=["greedy", "rejection"])
def test_blocks_follow_verdicts_that_accept_none_some_or_all(kind: Kind, changes: dict[str, Any]) -> None:
    """Each block equals the reference's or, for drawn tokens, that of a new method."""
    want = wanted_block(kind.text, LENGTH, **changes)
    drafter = Drafter(kind).open(want)
    vocabulary = HEAD_VOCABULARY if kind.text is HEAD_TEXT else VOCABULARY
    for accepted in (0, 2, 1, LENGTH, 0):
        (block,) = drafter.draft(want)
        assert (block.session, block.base_len, block.prefix_hash) == ("s", len(want.tokens), want.prefix_hash)
        assert equal(block, fresh(kind, want))
        if not changes or kind.looks_up:
            assert block.tokens == kind.greedy(want.tokens, LENGTH)
        drafter.ahead(want.under(block.tree))
        stands = block.tokens[:accepted]
        other = (block.tokens[accepted] + 1) % vocabulary if accepted < len(block.tokens) else 1
        want = drafter.commit(want, *stands, other)
        (block,) = drafter.draft(want)
        assert equal(block, fresh(kind, want)), "and what was drafted ahead does not show"
        want = drafter.commit(want, kind.text[0])
    drafter.method.close(["s"])
    assert is_idle(drafter.method)


def test_draws_for_rejection_sampling_follow_the_probabilities_sent(kind: Kind) -> None:
    """Draws depend only on seed and prefix, not on a token's probability or on the shape."""
    found = set()
    for seed in range(6):
        want = wanted_block(kind.text, LENGTH, seed=seed, least_chance=0.9, shape=Shape.TREE, **EXACT)
        drafter = Drafter(kind).open(want)
        (block,) = drafter.draft(want)
        (again,) = drafter.draft(want)
        assert equal(again, block), "only the last token is read again, which may round differently"
        shorter = fresh(kind, replace(want, max_tokens=2))
        assert shorter.tree == block.tree.first(2)
        found.add(block.tokens)
        if block.tree.probs is None:
            assert block.tree == DraftTree.chain(kind.greedy(kind.text, LENGTH)), "point masses need no probabilities"
            continue
        assert len(block.tokens) == min(LENGTH, kind.width), "the length depends on nothing that was drawn"
        prefix = Prefix(KEY, kind.text)
        for place, (token, *sent) in enumerate(
            zip(block.tokens, block.tree.probs.token_ids, block.tree.probs.weights, strict=True)
        ):
            ids, weights = map(torch.tensor, sent)
            logits = kind.logits(kind.text, block.tokens[:place])
            assert ids.tolist() == logits.topk(len(ids)).indices.tolist()
            shares = (logits[ids] - logits.max()).exp()
            torch.testing.assert_close(weights / max(weights), shares, rtol=0.0, atol=2e-4)
            drawn = gumbel_argmax(weights.double().log(), key(seed, 0, prefix.hash, Purpose.DRAFT))
            assert token == ids[drawn]
            prefix.extend((token,))
    assert len(found) > 3 or kind.looks_up, "the seed matters"


@SAMPLINGS
def test_trees_have_the_likeliest_tokens_and_no_more_than_requested(kind: Kind, sampling: Sampling) -> None:
    chain = fresh(kind, wanted_block(kind.text, 8, sampling=sampling))
    for most in (1, 3, 8):
        block = fresh(kind, wanted_block(kind.text, most, sampling=sampling, shape=Shape.TREE))
        assert 0 < len(block.tokens) <= most
        assert block.tree.main_path[0] == chain.tokens[0]
        assert block.chances == tuple(sorted(block.chances, reverse=True))
        assert len(block.chances) == len(block.tokens)
    assert not block.tree.is_chain


@RULES
@pytest.mark.parametrize("shape", Shape)
def test_tokens_that_are_not_worth_their_verification_are_not_sent(
    kind: Kind, acceptance: Any, sampling: Sampling, shape: Shape
) -> None:
    """Rejection sampling sends all tokens, because dropping a token for its value would bias the text."""
    want = wanted_block(kind.text, 6, sampling=sampling, acceptance=acceptance, shape=shape)
    blocks = [fresh(kind, replace(want, least_chance=least)) for least in (0.0, 0.1, 0.3, 1.0)]
    sizes = [len(block.tokens) for block in blocks]
    if acceptance is REJECTION:
        assert len(set(sizes)) == 1
    else:
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1] == 0
        for block, least in zip(blocks, (0.0, 0.1, 0.3), strict=False):
            assert all(chance >= least for chance in block.chances)


def test_sessions_of_one_pass_get_what_each_gets_alone(kind: Kind) -> None:
    """The cases have several text and block lengths, every acceptance rule, and lookahead blocks."""
    rules = {"greedy": {}, "drawn": {"sampling": DRAWN}, "rejection": EXACT}
    rules["penalized"] = {"sampling": Sampling(presence_penalty=0.5)}
    wants = [
        wanted_block(kind.text[at % 2 * 3 :], LENGTH - at % 3, name, shape=list(Shape)[at % 2], **changes)
        for at, (name, changes) in enumerate(rules.items())
    ]
    drafter = Drafter(kind, **({"pages": 512} if kind.tight else {})).open(*wants)
    blocks = drafter.draft(*wants)
    assert all(equal(block, fresh(kind, want)) for block, want in zip(blocks, wants, strict=True))
    assert all(block.tokens for block in blocks)
    ahead = [want.under(block.tree) for want, block in zip(wants, blocks, strict=True)]
    guesses = drafter.ahead(*ahead)
    for want, request in zip(wants, ahead, strict=True):
        alone = Drafter(kind).open(want)
        alone.draft(want)
        expected = {guess.outcome: guess for guess in alone.ahead(request)}
        found = {guess.outcome: guess for guess in guesses if guess.session == want.open.session}
        assert found.keys() == expected.keys()
        assert all(equal(guess, expected[outcome]) for outcome, guess in found.items())


# ---------------------------------------------------------------- drafting ahead of verdicts


@RULES
def test_blocks_ahead_are_for_possible_verdicts_and_right(kind: Kind, acceptance: Any, sampling: Sampling) -> None:
    """A correct lookahead block equals the block drafted after the verdict, unless the method reads target states."""
    want = wanted_block(kind.text, 3, sampling=sampling, acceptance=acceptance)
    for drafted in (0, 2, 3):
        drafter = Drafter(kind).open(want)
        (block,) = drafter.draft(want)
        under = block.tokens[:drafted]
        assert not any(guess.tokens for guess in drafter.ahead(want.under(under, max_tokens=0)))
        request = want.under(under, max_tokens=2)
        guesses = drafter.ahead(request)
        assert guesses or len(under) >= kind.width
        assert len({guess.outcome for guess in guesses}) == len(guesses)
        for guess in guesses:
            *stands, new = guess.outcome
            assert tuple(stands) == under[: len(stands)]
            assert len(stands) == len(under) or new != under[len(stands)], "that would be one more accepted"
            later = want.after(*guess.outcome, max_tokens=len(guess.tokens))
            assert (guess.base_len, guess.prefix_hash) == (len(later.tokens), later.prefix_hash)
            assert 0 < len(guess.tokens) <= 2
            if acceptance is REJECTION and not kind.looks_up and guess.tree.probs is not None:
                assert all(map(operator.contains, guess.tree.probs.token_ids, guess.tokens))
            if kind.foresees:
                assert equal(guess, fresh(kind, later))


@pytest.mark.parametrize("changes", [{}, EXACT], ids=["greedy", "rejection"])
def test_a_confirmed_guess_leaves_no_trace(kind: Kind, changes: dict[str, Any]) -> None:
    """This holds once the states of its tokens have arrived."""
    want = wanted_block(kind.text, 3, **changes)
    drafter = Drafter(kind).open(want)
    hit = max(drafter.ahead(want.under(NO_TREE)), key=lambda guess: guess.chance)
    want = drafter.commit(want, *hit.outcome)
    newcomer = Drafter(kind).open(want)
    newcomer.draft(want)
    request = want.under((7,))
    found, expected = ({guess.outcome: guess for guess in each.ahead(request)} for each in (drafter, newcomer))
    shared = found.keys() & expected.keys()
    assert shared or kind.looks_up
    assert all(equal(found[outcome], expected[outcome]) for outcome in shared)
    assert equal(drafter.draft(want)[0], fresh(kind, want))


@RULES
def test_an_interruption_leaves_the_beginnings_of_blocks_and_no_trace(
    kind: Kind, acceptance: Any, sampling: Sampling
) -> None:
    want = wanted_block(kind.text, 2, sampling=sampling, acceptance=acceptance)

    def opened() -> tuple[Drafter, WantedBlock]:
        drafter = Drafter(kind).open(want)
        return drafter, want.under(drafter.draft(want)[0].tree)

    drafter, request = opened()
    whole = drafter.ahead(request)
    assert whole
    for checks in range(12):
        drafter, _ = opened()
        assert are_beginnings(drafter.ahead(request, interrupted=after_checks(checks)), whole)
    if sampling is GREEDY or acceptance is REJECTION:  # otherwise decided tokens change the predicted outcomes
        later = drafter.commit(want, 3)
        assert equal(drafter.draft(later)[0], fresh(kind, later))


# ---------------------------------------------------------------- sessions that open and close


@of(*CACHED)
def test_a_session_that_lost_its_pages_is_drafted_for_equally(kind: Kind) -> None:
    wants = {name: wanted_block(kind.text[at:], 2, name) for at, name in enumerate("ab")}
    assert sum(len(want.tokens) for want in wants.values()) > kind.tight * PAGE_SIZE - 4, "one of them must go"
    drafter = Drafter(kind, pages=kind.tight).open(*wants.values())
    for _ in range(5):
        for name, want in wants.items():
            (block,) = drafter.draft(want)
            assert equal(block, fresh(kind, want))
            wants[name] = drafter.commit(want, block.tokens[0])
    drafter.method.close(["a", "b"])
    assert is_idle(drafter.method)


def test_a_closed_session_leaves_nothing_to_one_of_its_name(kind: Kind) -> None:
    drafter = Drafter(kind)
    drafter.method.close(["unknown"])
    for want in (wanted_block(kind.text, LENGTH), wanted_block(kind.text[2:], LENGTH, sampling=DRAWN)):
        drafter.open(want)
        assert drafter.draft(want) == [fresh(kind, want)]
        drafter.ahead(want.under((3,)))
        drafter.method.close(["s", "unknown"])
        drafter.method.close(["s"])
        assert is_idle(drafter.method)


# ---------------------------------------------------------------- the target's states


@of(*READERS)
def test_states_arrive_in_any_order_and_twice(kind: Kind) -> None:
    want = wanted_block(kind.text, LENGTH)
    drafter = Drafter(kind)
    drafter.method.open(replace(want.open, tokens=want.tokens))
    for begin, end in ((8, None), (0, 3), (8, None), (0, 3), (2, 9)):
        drafter.give(want, begin, end)
    assert drafter.draft(want) == [fresh(kind, want)]


@of(*READERS)
@pytest.mark.parametrize("missing", [0, 5, len(HEAD_TEXT) - 2], ids=["first", "middle", "last"])
def test_a_session_waits_for_the_states_that_its_head_reads(kind: Kind, missing: int) -> None:
    """Other sessions of the pass do not wait, and a head that reads only the last state waits only for it."""
    gap, whole = (wanted_block(kind.text, LENGTH, name) for name in ("gap", "whole"))
    drafter = Drafter(kind).open(whole)
    drafter.method.open(replace(gap.open, tokens=gap.tokens))
    drafter.give(gap, 0, missing)
    drafter.give(gap, missing + 1)
    complete = [fresh(kind, gap), fresh(kind, whole)]
    waits = missing == len(kind.text) - 2 or kind.width > 5 or kind.states == 96
    for _ in range(2):
        found = drafter.draft(gap, whole)
        assert found == (
            [Proposal("gap", len(gap.tokens), gap.prefix_hash, NO_TREE), complete[1]] if waits else complete
        )
    assert bool(drafter.ahead(gap.under((3, 4)))) is not waits
    drafter.give(gap, missing, missing + 1)
    assert drafter.draft(gap, whole) == complete


@of("ngram", "suffix", "medusa", "mlp_speculator", "dflash")
def test_a_non_waiting_target_gets_an_empty_answer_without_a_block(kind: Kind) -> None:
    """Otherwise the target would consider the drafter silent, unless it is verifying a block."""
    want = wanted_block((1, 2, 3, 4))
    method = kind.make()
    method.open(replace(want.open, tokens=want.tokens))
    assert method.draft_ahead([want.under(NO_TREE).ahead], never) == [Proposal("s", 4, want.prefix_hash, NO_TREE)]
    assert method.draft_ahead([want.under((9,)).ahead], never) == []


@of(*READERS)
def test_states_of_a_session_that_is_not_open_are_ignored(kind: Kind) -> None:
    want = wanted_block(kind.text, LENGTH)
    drafter = Drafter(kind)
    drafter.give(want)
    for _ in range(2):
        drafter.method.open(replace(want.open, tokens=want.tokens))
        assert drafter.draft(want)[0].tree == NO_TREE
        drafter.give(want)
        assert drafter.draft(want) == [fresh(kind, want)]
        drafter.method.close(["s"])
        drafter.give(want)


@of(*READERS)
@pytest.mark.parametrize("changes", [{}, EXACT], ids=["greedy", "rejection"])
@pytest.mark.parametrize("shape", Shape)
def test_nonfinite_states_propose_nothing(kind: Kind, changes: dict[str, Any], shape: Shape) -> None:
    want = wanted_block(kind.text, 3, shape=shape, **changes)
    drafter = Drafter(kind)
    drafter.method.open(replace(want.open, tokens=want.tokens))
    drafter.method.states("s", 0, torch.full_like(kind.rows(want.tokens), torch.nan))
    assert drafter.draft(want)[0].tree == NO_TREE
    assert not any(guess.tokens for guess in drafter.ahead(want.under((1, 2))))
