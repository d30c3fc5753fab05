"""Tests the inputs of an EAGLE head when the target's states arrive in time, late, twice, or never.

`test_methods.py` covers behavior common to all methods.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.drafters.heads.eagle.config import EagleOverrides
from actors.drafters.heads.eagle.loading import EagleRunner
from actors.drafters.model.draft_model import DraftModel
from actors.models.decoder import ForwardOutput
from cluster.drafting.requests import Proposal
from protos.messages import Acceptance, Shape
from tests.unit.actors.drafters.drafting import (
    DRAFTED,
    DRAWN,
    after_checks,
    block_of,
    decided,
    head_method,
    propose,
    wanted_block,
)
from tests.unit.actors.drafters.heads.eagle_fixtures import Drive, case, checkpoint, loaded

BLOCK = 2  # short, because a random head has low confidence
Fed = list[list[tuple[int, tuple[int, ...]]]]  # (start, tokens) by forward and row


@pytest.fixture(params=["eagle1", "eagle3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Fed:
    """Records the inputs of the method's runner."""
    forwards: Fed = []
    usual: Callable[..., ForwardOutput] = EagleRunner.forward

    def forward(runner: EagleRunner, rows: Sequence[InputRow], *others: Any, **named: Any) -> ForwardOutput:
        forwards.append([(row.start, row.tokens) for row in rows])
        return usual(runner, rows, *others, **named)

    monkeypatch.setattr(EagleRunner, "forward", forward)
    return forwards


def taken(fed: Fed) -> Fed:
    found = list(fed)
    fed.clear()
    return found


class Session:
    """Session of a new method; its default text is the fixture's prompt and the token after it."""

    def __init__(self, name: str, text: Sequence[int] = (), max_tokens: int = DRAFTED, **options: Any) -> None:
        self.name = name
        self.want = wanted_block(text or decided(case(name)), max_tokens)
        self.method: DraftModel = head_method("eagle", checkpoint(name), **options)
        self.method.open(replace(self.want.open, tokens=self.want.tokens))

    def given(self, begin: int = 0, end: int | None = None) -> "Session":
        """Returns the session with the prompt's states from `begin` on."""
        self.method.states("s", begin, case(self.name)["features"][begin:end])
        return self

    def draft(self, *tokens: int, **changes: Any) -> tuple[int, ...]:
        """Returns the block after these further tokens."""
        return block_of(self.method, self.want.after(*tokens, **changes)).tokens

    def ahead(self, under: Any, *tokens: int, **changes: Any) -> list[Proposal]:
        want = self.want.after(*tokens)
        return propose(self.method, [want.under(under, max_tokens=self.want.max_tokens, **changes)])


def from_scratch(name: str, tokens: Sequence[int], features: Tensor, count: int = DRAFTED) -> tuple[int, ...]:
    """Returns the greedy chain after a text; tokens beyond the true states are fed with the head's own states."""
    drive = Drive(loaded(checkpoint(name)))
    states = drive.head.inputs(features)
    for end in range(len(features) + 1, len(tokens) + 1):
        read = drive.feed(torch.tensor(tokens[1:end]), states, 0)
        assert read.hidden is not None
        states = torch.cat([states, read.hidden[-1:]])
    return tuple(drive.chain(read, len(tokens) - 1, count)[0].tolist())


def with_more(name: str, count: int) -> Tensor:
    """Returns the features of the prompt and of further tokens that the head would not predict."""
    features = case(name)["features"]
    more = torch.randn(count, features.shape[-1], generator=torch.Generator().manual_seed(7))
    return torch.cat([features, more])


# ---------------------------------------------------------------- states in time


def test_a_chain_equals_the_reference_and_is_fed_token_by_token(name: str, fed: Fed) -> None:
    session = Session(name).given()
    chain = case(name)["chain_tokens"].tolist()
    assert session.draft() == tuple(chain)
    steps = [[(12 + place, (token,))] for place, token in enumerate(chain[:-1])]
    assert fed == [[(0, session.want.tokens[1:])], *steps], "the first token is not fed"


def test_a_second_round_feeds_the_new_tokens_with_true_states(name: str, fed: Fed) -> None:
    known = case(name)
    session = Session(name).given()
    session.draft()
    taken(fed)
    text = known["extend_ids"].tolist()
    session.method.states("s", 12, known["extend_features"])
    assert session.draft(*text[13:]) == tuple(known["extend_chain_tokens"].tolist())
    assert fed[0] == [(12, tuple(text[13:]))]


def test_accepted_tokens_are_fed_again_with_true_states(name: str, fed: Fed) -> None:
    """The accepted tokens are cached with recycled states; the verdict delivers the true states."""
    session = Session(name).given()
    further = (*session.draft()[:3], 5)
    features = with_more(name, 4)
    session.method.states("s", 12, features[12:])
    text = (*session.want.tokens, *further)
    expected = from_scratch(name, text, features)
    taken(fed)
    assert session.draft(*further) == expected
    assert taken(fed)[0] == [(12, text[13:])]
    session.draft(*further)
    assert fed[0] == [(15, text[16:])], "what was fed with true states stays"


def test_sessions_that_begin_alike_share_no_pages(name: str, fed: Fed) -> None:
    """The content of a place depends on the token after it, so equal prefixes have different pages."""
    session = Session(name)
    for other in ("s", "other"):
        want = replace(session.want, open=replace(session.want.open, session=other))
        session.method.open(replace(want.open, tokens=want.tokens))
        session.method.states(other, 0, case(name)["features"])
        block_of(session.method, want)
        assert taken(fed)[0] == [(0, want.tokens[1:])]


def test_a_long_prompt_is_read_over_several_requests(name: str, fed: Fed) -> None:
    session = Session(name, pass_tokens=5).given()
    blocks = [session.draft() for _ in range(3)]
    assert blocks == [(), (), tuple(case(name)["chain_tokens"].tolist())]
    text = session.want.tokens
    assert [row for (row,) in fed[:3]] == [(0, text[1:5]), (4, text[5:10]), (9, text[10:])]


# ---------------------------------------------------------------- missing states


def test_drafts_with_states_are_read_while_others_wait(name: str, fed: Fed) -> None:
    session = Session(name)
    assert session.draft() == ()
    session.given(0, 7).given(8)
    assert session.draft() == ()
    assert taken(fed) == [[(0, session.want.tokens[1:8])]]
    assert session.draft() == ()
    assert fed == [], "and what the head makes of it takes no missing state's place"
    session.given(7, 8)
    assert session.draft() == tuple(case(name)["chain_tokens"].tolist())


def test_a_text_of_one_token_gets_no_block(name: str, fed: Fed) -> None:
    assert Session(name, text=(1,)).given(0, 1).draft() == ()
    assert fed == []


@pytest.mark.parametrize(("length", "drafts"), [(13, 5), (14, 4), (17, 1), (18, 0)])
def test_beyond_the_heads_positions_there_is_no_block(name: str, fed: Fed, length: int, drafts: int) -> None:
    """The head has 16 positions. A text of n tokens takes n - 1, and each drafted token except the last takes one."""
    features = with_more(name, 8)[: length - 1]
    text = (*decided(case(name)), 5, 6, 7, 8, 9)[:length]
    session = Session(name, text, overrides=EagleOverrides(max_positions=16))
    session.method.states("s", 0, features)
    block = session.draft()
    assert fed or drafts == 0
    assert block == from_scratch(name, text, features)[:drafts]


# ---------------------------------------------------------------- a text that begins in its middle


@pytest.mark.parametrize("begin", [1, 6, 10])
def test_states_from_mid_text_draft_as_for_a_text_starting_there(name: str, fed: Fed, begin: int) -> None:
    """The test compares the first block, a lookahead block, and the next block."""
    features = with_more(name, 2)
    session = Session(name, max_tokens=BLOCK)
    text = session.want.tokens
    session.method.begin("s", begin)
    session.given(begin)
    block = session.draft()
    assert fed[0] == [(0, text[begin + 1 :])]
    assert block == from_scratch(name, text[begin:], features[begin:12])[:BLOCK]
    shifted = Session(name, text[begin:], BLOCK)
    shifted.method.states("s", 0, features[begin:12])
    shifted.draft()
    guesses, expected = ({guess.outcome: guess.tokens for guess in each.ahead((5,))} for each in (session, shifted))
    assert guesses == expected
    session.method.committed("s", (5, 6))
    session.method.states("s", 12, features[12:14])
    assert session.draft(5, 6) == from_scratch(name, (*text, 5, 6)[begin:], features[begin:14])[:BLOCK]
    session.method.close(["s"])
    assert session.method.is_idle


def test_a_state_that_is_missing_after_the_beginning_is_waited_for(name: str) -> None:
    session = Session(name)
    session.method.begin("s", 4)
    assert session.given(5).draft() == ()
    assert session.given(4, 5).draft() == from_scratch(name, session.want.tokens[4:], case(name)["features"][4:])


def test_beyond_the_heads_positions_a_text_that_begins_late_enough_gets_a_block(name: str) -> None:
    session = Session(name, max_tokens=BLOCK, overrides=EagleOverrides(max_positions=8))
    session.method.begin("s", 6)
    block = session.given(6).draft()
    assert block == from_scratch(name, session.want.tokens[6:], case(name)["features"][6:])[:BLOCK]


# ---------------------------------------------------------------- late states


def read_ahead(name: str) -> tuple[Session, list[Proposal]]:
    """Returns a session with its first block under verification, and the lookahead blocks."""
    session = Session(name, max_tokens=BLOCK).given()
    return session, session.ahead(session.draft())


def test_blocks_are_drafted_ahead_from_recycled_states(name: str) -> None:
    """The chain continues after the whole block and the expected token without a break."""
    _, guesses = read_ahead(name)
    whole = case(name)["chain_tokens"].tolist()
    (after,) = [guess for guess in guesses if guess.outcome == tuple(whole[: BLOCK + 1])]
    assert list(after.tokens) == whole[BLOCK + 1 : 2 * BLOCK + 1]
    assert any(len(guess.outcome) <= BLOCK for guess in guesses), "rejections are foreseen too"


def test_drafting_continues_from_recycled_states_until_true_states_arrive(name: str, fed: Fed) -> None:
    """If only some states arrive, the rest is fed with recycled states, and again with true states later."""
    session, guesses = read_ahead(name)
    hit = max(guesses, key=lambda guess: len(guess.outcome))
    assert session.draft(*hit.outcome) == hit.tokens
    features = with_more(name, len(hit.outcome))
    text = (*session.want.tokens, *hit.outcome)
    expected = from_scratch(name, text, features)
    for begin, end in ((12, 13), (13, None)):
        session.method.states("s", begin, features[begin:end])
        taken(fed)
        block = session.draft(*hit.outcome, max_tokens=DRAFTED)
        assert fed[0] == [(begin, text[begin + 1 :])], "what was read is read again"
        assert len(block) == DRAFTED
    assert block == expected


def test_after_a_verdict_that_was_foreseen_rejections_are_foreseen_again(name: str, fed: Fed) -> None:
    """The head reads the block again with true states, which yields alternatives to its tokens."""
    session, guesses = read_ahead(name)
    hit = max(guesses, key=lambda guess: len(guess.outcome))
    text = (*session.want.tokens, *hit.outcome)
    features = with_more(name, len(hit.outcome))
    session.method.states("s", 12, features[12:])
    taken(fed)
    found = session.ahead(hit.tokens, *hit.outcome)
    assert fed[0][0] == (12, (*text[13:], *hit.tokens))
    rejections = [guess for guess in found if len(guess.outcome) == 1]
    assert rejections
    for guess in rejections:
        assert guess.tokens == from_scratch(name, (*text, *guess.outcome), features, BLOCK)


def test_a_token_beside_the_main_path_is_read_with_the_state_that_the_main_path_had(name: str) -> None:
    session = Session(name, max_tokens=6).given()
    block = block_of(session.method, replace(session.want, shape=Shape.TREE))
    assert not block.tree.is_chain
    beside = set(block.tree.off_main_path)
    assert any(guess.outcome[:-1] in beside for guess in session.ahead(block.tree, shape=Shape.TREE))


def test_reading_resumes_after_an_interruption(name: str, fed: Fed) -> None:
    _, whole = read_ahead(name)
    session = Session(name, max_tokens=BLOCK).given()
    block = session.draft()
    taken(fed)
    want = session.want.under(block, max_tokens=BLOCK)
    assert propose(session.method, [want], after_checks(1)) == []
    best, *_ = propose(session.method, [want])
    assert best.outcome[:BLOCK] == block
    assert best in whole
    interrupted, read, *_ = fed
    assert (13, block[1:]) in interrupted
    assert read == [(13, block[1:])], "what was read before is not read again"


@pytest.mark.parametrize("acceptance", Acceptance)
def test_drawn_tokens_are_of_the_draft_vocabulary(name: str, acceptance: Acceptance) -> None:
    session = Session(name).given()
    want = replace(session.want, open=replace(session.want.open, sampling=DRAWN, acceptance=acceptance, seed=3))
    block = block_of(session.method, want)
    assert len(block.tokens) == DRAFTED
    assert set(block.tokens) <= set(loaded(checkpoint(name)).token_ids.tolist())
    assert block_of(session.method, want) == block


def test_a_method_states_which_states_it_needs(name: str) -> None:
    needs = Session(name).method.needs
    assert needs == loaded(checkpoint(name)).config.needs
    assert name == "eagle1" or (needs.layers, needs.width) == ((2, 4, 5), 96)
