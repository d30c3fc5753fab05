"""Drafting with an EAGLE head: what is fed when the target's states come in time, late, twice, or never."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.drafters.heads.eagle.config import EagleOverrides
from actors.drafters.heads.eagle.loading import AS_CONFIGURED, EagleRunner
from actors.drafters.heads.eagle.method import eagle_draft_model
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.models.decoder import ForwardOutput
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import after_checks
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.actors.drafters.heads.eagle_fixtures import PAGE_SIZE, Drive, case, checkpoint, loaded
from tests.unit.cluster.samples import GREEDY, KEY, an_open

NAMES = ("eagle1", "eagle3")
COLUMNS = {"eagle1": 96, "eagle3": 48}
DRAFTED = 5
BLOCK = 2  # short ones: a random head believes no longer one


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Fed:
    """Inputs of the method's runner: (start, tokens) by forward and row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards: list[list[tuple[int, tuple[int, ...]]]] = []
        self._forward: Callable[..., ForwardOutput] = EagleRunner.forward
        spy = self

        def forward(runner: EagleRunner, rows: Sequence[InputRow], *others: Any, **named: Any) -> ForwardOutput:
            spy.forwards.append([(row.start, row.tokens) for row in rows])
            return spy._forward(runner, rows, *others, **named)

        monkeypatch.setattr(EagleRunner, "forward", forward)

    def take(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        found = self.forwards
        self.forwards = []
        return found


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Fed:
    return Fed(monkeypatch)


def a_method(
    name: str, pages: int = 64, pass_tokens: int = 2048, overrides: EagleOverrides = AS_CONFIGURED
) -> DraftModel:
    limits = DraftingLimits(top_k=8, pass_tokens=pass_tokens)
    return eagle_draft_model(loaded(checkpoint(name), overrides), pages, PAGE_SIZE, limits, DRAFTED, lambda: 0.0)


def a_want(tokens: Sequence[int], session: str = "s", max_tokens: int = DRAFTED, **changes: Any) -> Want:
    request = an_open(session, **{"sampling": GREEDY, "tokens": (1,)} | changes)
    return Want(request, tuple(tokens), Prefix(KEY, tuple(tokens)).hash, max_tokens)


def text_of(name: str) -> tuple[int, ...]:
    """The prompt and the token after it."""
    known = case(name)
    return (*known["input_ids"].tolist(), int(known["next_token"]))


def opened(method: DraftModel, want: Want) -> None:
    method.open(replace(want.open, tokens=want.tokens))


def asked(method: DraftModel, want: Want) -> tuple[int, ...]:
    (proposal,) = propose(method, [want])
    assert (proposal.session, proposal.base_len) == (want.open.session, len(want.tokens))
    return proposal.tokens


def from_scratch(name: str, tokens: Sequence[int], features: Tensor, count: int = DRAFTED) -> tuple[int, ...]:
    """The greedy chain after a text, all of which is fed with true states: what the method must come to."""
    drive = Drive(loaded(checkpoint(name)))
    read = drive.feed(torch.tensor(tokens[1:]), drive.runner.project(features), 0)
    return tuple(drive.chain(read, len(tokens) - 1, count)[0].tolist())


def more_features(name: str, count: int) -> Tensor:
    """Returns target features of further tokens that the head would not predict."""
    width = case(name)["features"].shape[-1]
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7))


# ---------------------------------------------------------------- states in time


def test_chains_are_the_references(name, fed):
    known = case(name)
    method = a_method(name)
    want = a_want(text_of(name))
    opened(method, want)
    method.states("s", 0, known["features"])
    assert asked(method, want) == tuple(known["chain_tokens"].tolist())
    chain = known["chain_tokens"].tolist()
    steps = [[(12 + place, (token,))] for place, token in enumerate(chain[:-1])]
    assert fed.take() == [[(0, text_of(name)[1:])], *steps], "the first token is not fed"


def test_a_second_round_feeds_the_new_tokens_with_true_states(name, fed):
    known = case(name)
    method = a_method(name)
    opened(method, a_want(text_of(name)))
    method.states("s", 0, known["features"])
    asked(method, a_want(text_of(name)))
    fed.take()
    text = known["extend_ids"].tolist()
    method.states("s", 12, known["extend_features"])
    assert asked(method, a_want(text)) == tuple(known["extend_chain_tokens"].tolist())
    assert fed.take()[0] == [(12, tuple(text[13:]))]


def test_accepted_tokens_are_fed_again_with_true_states(name, fed):
    """They are cached already, of recycled states: a verdict that accepts them brings the true ones."""
    known = case(name)
    method = a_method(name)
    opened(method, a_want(text_of(name)))
    method.states("s", 0, known["features"])
    drafted = asked(method, a_want(text_of(name)))
    text = (*text_of(name), *drafted[:3], 5)
    features = torch.cat([known["features"], more_features(name, 4)])
    method.states("s", 12, features[12:])
    fed.take()
    expected = from_scratch(name, text, features)
    fed.take()
    assert asked(method, a_want(text)) == expected
    assert fed.take()[0] == [(12, text[13:])]
    asked(method, a_want(text))
    assert fed.take()[0] == [(15, text[16:])], "what was fed with true states stays"


def test_sessions_of_different_lengths_are_drafted_together(name):
    known = case(name)
    method = a_method(name)
    wants = [a_want(text_of(name)), a_want(text_of(name)[:7], "other")]
    for want in wants:
        opened(method, want)
    method.states("s", 0, known["features"])
    method.states("other", 0, known["features"][:6])
    first, second = propose(method, wants)
    assert first.tokens == tuple(known["chain_tokens"].tolist())
    assert second.tokens == from_scratch(name, text_of(name)[:7], known["features"][:6])


def test_sessions_that_begin_alike_share_no_pages(name, fed):
    """The content of a place depends on the token after it, so equal prefixes have different pages."""
    known = case(name)
    method = a_method(name)
    for session in ("s", "other"):
        want = a_want(text_of(name), session)
        opened(method, want)
        method.states(session, 0, known["features"])
        assert asked(method, want) == tuple(known["chain_tokens"].tolist())
        assert fed.take()[0] == [(0, text_of(name)[1:])]
    method.close(["s", "other"])
    assert method.is_idle


def test_a_long_prompt_is_read_over_several_requests(name, fed):
    known = case(name)
    method = a_method(name, pass_tokens=5)
    want = a_want(text_of(name))
    opened(method, want)
    method.states("s", 0, known["features"])
    assert asked(method, want) == ()
    assert asked(method, want) == ()
    assert asked(method, want) == tuple(known["chain_tokens"].tolist())
    assert [row for (row,) in fed.take()[:3]] == [
        (0, text_of(name)[1:5]),
        (4, text_of(name)[5:10]),
        (9, text_of(name)[10:]),
    ]


def test_a_session_that_had_to_make_room_is_read_again(name):
    """Its states are still there."""
    known = case(name)
    method = a_method(name, pages=5)
    wants = [a_want(text_of(name)), a_want(text_of(name), "other")]
    for want in wants:
        opened(method, want)
        method.states(want.open.session, 0, known["features"])
    for want in (*wants, wants[0]):
        assert asked(method, want) == tuple(known["chain_tokens"].tolist())


# ---------------------------------------------------------------- states that come otherwise


def test_rows_come_in_any_order_and_twice(name):
    known = case(name)
    features = known["features"]
    method = a_method(name)
    want = a_want(text_of(name))
    opened(method, want)
    for first, end in ((8, 12), (0, 3), (8, 12), (0, 3), (2, 9)):
        assert asked(method, want) == ()
        method.states("s", first, features[first:end])
    assert asked(method, want) == tuple(known["chain_tokens"].tolist())


def test_without_a_state_that_is_needed_there_is_no_block(name, fed):
    known = case(name)
    method = a_method(name)
    want = a_want(text_of(name))
    opened(method, want)
    assert propose(method, [want]) == [Proposal("s", 13, want.prefix_hash, NO_TREE)]
    method.states("s", 0, known["features"][:7])
    method.states("s", 8, known["features"][8:])
    assert asked(method, want) == ()
    assert fed.take() == [[(0, text_of(name)[1:8])]], "what has its states is read meanwhile"
    assert asked(method, want) == ()
    assert fed.take() == [], "and what the head makes of it takes no missing state's place"
    ahead = replace(want, unverified=DraftTree.chain((3, 4)))
    assert propose(method, [ahead]) == []
    method.states("s", 7, known["features"][7:8])
    assert asked(method, want) == tuple(known["chain_tokens"].tolist())


def test_others_do_not_wait_for_a_session_without_states(name):
    known = case(name)
    method = a_method(name)
    wants = [a_want(text_of(name)), a_want(text_of(name), "other")]
    for want in wants:
        opened(method, want)
    method.states("other", 0, known["features"])
    first, second = propose(method, wants)
    assert (first.tokens, second.tokens) == ((), tuple(known["chain_tokens"].tolist()))


def test_a_text_of_one_token_gets_no_block(name, fed):
    method = a_method(name)
    opened(method, a_want((1,)))
    method.states("s", 0, case(name)["features"][:1])
    assert asked(method, a_want((1,))) == ()
    assert fed.take() == []


def test_states_of_a_session_that_is_closed_or_unknown_are_dropped(name):
    known = case(name)
    method = a_method(name)
    want = a_want(text_of(name))
    method.states("s", 0, known["features"])
    assert asked(method, want) == ()
    method.states("s", 0, known["features"])
    assert asked(method, want) != ()
    method.close(["s"])
    assert method.is_idle
    assert asked(method, want) == (), "a session of the same name begins without states"


@pytest.mark.parametrize(("length", "drafts"), [(13, 5), (14, 4), (17, 1), (18, 0)])
def test_beyond_the_heads_positions_there_is_no_block(name, fed, length, drafts):
    """The head takes 16 positions; a text of n tokens takes n - 1, and each drafted token but the last one more."""
    method = a_method(name, overrides=EagleOverrides(max_positions=16))
    features = torch.cat([case(name)["features"], more_features(name, 8)])
    text = (*text_of(name), 5, 6, 7, 8, 9)[:length]
    opened(method, a_want(text))
    method.states("s", 0, features[: length - 1])
    found = asked(method, a_want(text))
    assert found == from_scratch(name, text, features[: length - 1])[:drafts]
    assert (fed.forwards != []) or drafts == 0


# ---------------------------------------------------------------- a text that begins in its middle


@pytest.mark.parametrize("begin", [1, 6, 10])
def test_states_that_begin_in_mid_text_bring_what_a_text_that_begins_there_brings(name, fed, begin):
    """Compares the first block, one ahead, and the next one."""
    features = torch.cat([case(name)["features"], more_features(name, 8)])
    text = (*text_of(name), 5, 6)
    method = a_method(name)
    want = a_want(text_of(name), max_tokens=BLOCK)
    opened(method, want)
    method.begin("s", begin)
    method.states("s", begin, features[begin:12])
    assert asked(method, want) == from_scratch(name, text_of(name)[begin:], features[begin:12])[:BLOCK]
    assert fed.take()[0] == [(0, text_of(name)[begin + 1 :])]
    ahead = replace(want, unverified=DraftTree.chain((5,)))
    guesses = {proposal.outcome: proposal.tokens for proposal in propose(method, [ahead])}
    shifted = a_method(name)
    beginning = a_want(text_of(name)[begin:], max_tokens=BLOCK)
    opened(shifted, beginning)
    shifted.states("s", 0, features[begin:12])
    asked(shifted, beginning)
    found = propose(shifted, [replace(beginning, unverified=DraftTree.chain((5,)))])
    assert guesses == {proposal.outcome: proposal.tokens for proposal in found}
    method.committed("s", (5, 6))
    method.states("s", 12, features[12:14])
    expected = from_scratch(name, text[begin:], features[begin:14])[:BLOCK]
    assert asked(method, a_want(text, max_tokens=BLOCK)) == expected
    method.close(["s"])
    assert method.is_idle


def test_a_state_that_is_missing_after_the_beginning_is_waited_for(name):
    features = case(name)["features"]
    method = a_method(name)
    want = a_want(text_of(name))
    opened(method, want)
    method.begin("s", 4)
    method.states("s", 5, features[5:])
    assert asked(method, want) == ()
    method.states("s", 4, features[4:5])
    assert asked(method, want) == from_scratch(name, text_of(name)[4:], features[4:])


def test_beyond_the_heads_positions_a_text_that_begins_late_enough_gets_a_block(name):
    features = case(name)["features"]
    method = a_method(name, overrides=EagleOverrides(max_positions=8))
    want = a_want(text_of(name), max_tokens=BLOCK)
    opened(method, want)
    method.begin("s", 6)
    method.states("s", 6, features[6:])
    assert asked(method, want) == from_scratch(name, text_of(name)[6:], features[6:])[:BLOCK]


# ---------------------------------------------------------------- late states


def read_ahead(method: DraftModel, name: str) -> tuple[tuple[int, ...], list[Proposal]]:
    """A first block, and what is drafted ahead while it is verified."""
    want = a_want(text_of(name), max_tokens=BLOCK)
    opened(method, want)
    method.states("s", 0, case(name)["features"])
    block = asked(method, want)
    return block, propose(method, [replace(want, unverified=DraftTree.chain(block))])


def test_blocks_are_drafted_ahead_from_recycled_states(name):
    """The chain continues after the whole block and the expected token as if it were one."""
    method = a_method(name)
    block, proposals = read_ahead(method, name)
    whole = case(name)["chain_tokens"].tolist()
    assert list(block) == whole[:BLOCK]
    (after,) = [proposal for proposal in proposals if proposal.outcome == tuple(whole[: BLOCK + 1])]
    assert list(after.tokens) == whole[BLOCK + 1 : 2 * BLOCK + 1]
    others = [proposal.outcome for proposal in proposals]
    assert any(len(outcome) <= BLOCK for outcome in others), "rejections are foreseen too"


def test_while_the_true_states_are_late_drafting_goes_on_from_recycled_ones(name, fed):
    method = a_method(name)
    _, proposals = read_ahead(method, name)
    outcome = max((proposal.outcome for proposal in proposals), key=len)
    text = (*text_of(name), *outcome)
    (proposal,) = [each for each in proposals if each.outcome == outcome]
    assert asked(method, a_want(text, max_tokens=BLOCK)) == proposal.tokens
    features = torch.cat([case(name)["features"], more_features(name, len(outcome))])
    method.states("s", 12, features[12:])
    fed.take()
    expected = from_scratch(name, text, features)
    fed.take()
    assert asked(method, a_want(text)) == expected, "once they are there, what was read is read again"
    assert fed.take()[0] == [(12, text[13:])]


def test_states_that_arrive_in_part_take_the_place_of_recycled_ones_in_part(name):
    """The rest is fed with what was recycled before, and once more when its states are there."""
    method = a_method(name)
    _, proposals = read_ahead(method, name)
    outcome = max((proposal.outcome for proposal in proposals), key=len)
    text = (*text_of(name), *outcome)
    asked(method, a_want(text))
    features = torch.cat([case(name)["features"], more_features(name, len(outcome))])
    method.states("s", 12, features[12:13])
    assert len(asked(method, a_want(text))) == DRAFTED
    method.states("s", 13, features[13:])
    assert asked(method, a_want(text)) == from_scratch(name, text, features)


def test_after_a_verdict_that_was_foreseen_rejections_are_foreseen_again(name, fed):
    """The block is read again with true states first, and what may come instead of its tokens is found in that."""
    method = a_method(name)
    _, proposals = read_ahead(method, name)
    guess = max(proposals, key=lambda proposal: len(proposal.outcome))
    text = (*text_of(name), *guess.outcome)
    features = torch.cat([case(name)["features"], more_features(name, len(guess.outcome))])
    method.states("s", 12, features[12:])
    want = replace(a_want(text, max_tokens=BLOCK), unverified=DraftTree.chain(guess.tokens))
    fed.take()
    found = propose(method, [want])
    assert fed.take()[0][0] == (12, (*text[13:], *guess.tokens))
    rejections = [proposal for proposal in found if len(proposal.outcome) == 1]
    assert rejections
    for proposal in rejections:
        assert proposal.tokens == continued(name, (*text, *proposal.outcome), features)


def continued(name: str, tokens: Sequence[int], features: Tensor) -> tuple[int, ...]:
    """The greedy chain after a text whose last tokens, beyond the true states, are fed with what the head predicted."""
    drive = Drive(loaded(checkpoint(name)))
    known = len(features) + 1
    states = drive.runner.project(features)
    for end in range(known, len(tokens) + 1):
        read = drive.feed(torch.tensor(tokens[1:end]), states, 0)
        assert read.hidden is not None
        states = torch.cat([states, read.hidden[-1:]])
    return tuple(drive.chain(read, len(tokens) - 1, BLOCK)[0].tolist())


def test_a_token_beside_the_main_path_is_read_with_the_state_that_the_main_path_had(name):
    method = a_method(name)
    want = replace(a_want(text_of(name), max_tokens=6), shape=Shape.TREE)
    opened(method, want)
    method.states("s", 0, case(name)["features"])
    (proposal,) = propose(method, [want])
    assert not proposal.tree.is_chain
    found = propose(method, [replace(want, unverified=proposal.tree)])
    beside = set(proposal.tree.off_main_path)
    assert any(outcome[:-1] in beside for outcome in (each.outcome for each in found))


def test_after_an_interruption_reading_goes_on_from_where_it_was(name, fed):
    method = a_method(name)
    want = a_want(text_of(name), max_tokens=BLOCK)
    opened(method, want)
    method.states("s", 0, case(name)["features"])
    block = asked(method, want)
    ahead = replace(want, unverified=DraftTree.chain(block))
    whole = propose(method, [ahead])
    again = a_method(name)
    opened(again, want)
    again.states("s", 0, case(name)["features"])
    asked(again, want)
    fed.take()
    assert propose(again, [ahead], after_checks(1)) == []
    found = propose(again, [ahead])
    assert found[0].outcome[:BLOCK] == block
    assert found[0] in whole
    interrupted, read, *_ = fed.take()
    assert (13, block[1:]) in interrupted
    assert read == [(13, block[1:])], "what was read before is not read again"


@pytest.mark.parametrize("acceptance", Acceptance)
def test_drawn_tokens_are_of_the_draft_vocabulary(name, acceptance):
    """And under ratio a block is drafted, with its probabilities, as by any other draft model."""
    method = a_method(name)
    want = a_want(text_of(name), sampling=Sampling(temperature=1.0), acceptance=acceptance, seed=3)
    opened(method, want)
    method.states("s", 0, case(name)["features"])
    (proposal,) = propose(method, [want])
    assert len(proposal.tokens) == DRAFTED
    assert set(proposal.tokens) <= set(loaded(checkpoint(name)).token_ids.tolist())
    assert (proposal.tree.probs is not None) == (acceptance is Acceptance.REJECTION)
    (again,) = propose(method, [want])
    assert again == proposal


def test_what_a_method_needs_is_said_in_the_targets_terms():
    assert (a_method("eagle1").needs, a_method("eagle3").needs) == (
        loaded(checkpoint("eagle1")).config.needs,
        loaded(checkpoint("eagle3")).config.needs,
    )
    needs = a_method("eagle3").needs
    assert needs is not None
    assert (needs.layers, needs.width) == ((2, 4, 5), 96)
