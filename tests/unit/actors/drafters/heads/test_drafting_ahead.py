"""Blocks ahead of verdicts, by heads that predict several tokens: from what they made themselves, until states come."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.drafters.heads.mlp_speculator import MlpSpeculator
from cluster.drafting.requests import AheadRequest, Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import after_checks
from tests.unit.actors.drafters.heads.eagle_fixtures import altered, case, checkpoint
from tests.unit.actors.drafters.heads.state_drafting import StateReading, a_method, a_request, decided
from tests.unit.cluster.samples import KEY, an_open

MOST = 3
REJECTION = {"sampling": Sampling(), "acceptance": Acceptance.REJECTION}


@dataclass(frozen=True)
class Head:
    """A method, a text whose states it has, and what it says of the text's next places."""

    name: str
    next_token: str
    width: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return decided(case(self.name), self.next_token)

    @property
    def rows(self) -> Tensor:
        """(positions, width), of all but the last token."""
        found = case(self.name)["features"]
        return found if found.dim() > 1 else found.expand(len(self.tokens) - 1, -1)

    def method(self, **changes: object) -> StateReading:
        """Returns the method with the session opened and its states given."""
        found = a_method(self.name, checkpoint(self.name))
        found.open(an_open(tokens=self.tokens, **changes))
        found.states("s", 0, self.rows)
        return found


MEDUSA = Head("medusa", "next_token", 5)
DFLASH = Head("dflash", "anchor", 4)
SPECULATOR = Head("mlp_speculator", "next_token", 3)
AT_ONCE = {"medusa": MEDUSA, "dflash": DFLASH}
ALL = AT_ONCE | {"mlp_speculator": SPECULATOR}


@pytest.fixture(params=ALL)
def head(request: pytest.FixtureRequest) -> Head:
    return ALL[request.param]


@pytest.fixture(params=AT_ONCE)
def at_once(request: pytest.FixtureRequest) -> Head:
    return AT_ONCE[request.param]


def ahead_of(
    tokens: tuple[int, ...],
    unverified: DraftTree,
    most: int = MOST,
    shape: Shape = Shape.CHAIN,
    chances: tuple[float, ...] = (),
) -> AheadRequest:
    """A step over these draft tokens is under way."""
    prefix_hash = Prefix(KEY, tokens).hash
    return AheadRequest("s", len(tokens), prefix_hash, most, unverified, shape=shape, chances=chances)


def asked_ahead(
    method: StateReading, request: AheadRequest, interrupted: Callable[[], bool] = lambda: False
) -> list[Proposal]:
    return method.draft_ahead([request], interrupted)


def block_of(head: Head, most: int) -> tuple[int, ...]:
    (proposal,) = head.method().draft([a_request(head.tokens, most)])
    assert len(proposal.tokens) == most
    return proposal.tokens


# ---------------------------------------------------------------- what a head made itself


def test_after_each_outcome_come_the_places_that_are_left(at_once: Head) -> None:
    """A head's later positions do not depend on the verdict's tokens."""
    places = block_of(at_once, at_once.width)
    for verified in range(at_once.width + 1):
        found = asked_ahead(at_once.method(), ahead_of(at_once.tokens, DraftTree.chain(places[:verified])))
        for proposal in found:
            done = len(proposal.outcome)
            assert proposal.outcome[:-1] == places[: done - 1]
            assert proposal.tokens == places[done : done + MOST]
            assert proposal.base_len == len(at_once.tokens) + done
            assert proposal.prefix_hash == Prefix(KEY, (*at_once.tokens, *proposal.outcome)).hash
        outcomes = {proposal.outcome for proposal in found}
        assert (places[: verified + 1] in outcomes) == (verified + 1 < at_once.width), "all of it is accepted, and one"
        assert any(len(outcome) <= verified for outcome in outcomes) == (verified > 0), "rejections"


def test_behind_its_last_place_a_head_without_states_of_its_own_waits(at_once: Head) -> None:
    """Blocks after these verdicts are drafted once they arrive, and nothing is sent before."""
    places = block_of(at_once, at_once.width)
    found = asked_ahead(at_once.method(), ahead_of(at_once.tokens, DraftTree.chain(places)))
    assert all(len(proposal.outcome) < at_once.width for proposal in found)


def going_on(network: MlpSpeculator, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The recurrent head's greedy chain after tokens that follow the text, all from the one state of the target."""
    state = SPECULATOR.rows[-1:]
    for depth, token in enumerate((SPECULATOR.tokens[-1], *tokens)):
        output = network.predict_next(state, [token], depth)
        state = output.hidden
    found = [int(output.logits.argmax())]
    while len(found) < count:
        output = network.predict_next(state, [found[-1]], len(tokens) + len(found))
        state = output.hidden
        found.append(int(output.logits.argmax()))
    return tuple(found)


def sharper(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (6 if "head" in name else 1) * tensor for name, tensor in tensors.items()}


def network_of(method: StateReading) -> MlpSpeculator:
    network: MlpSpeculator = method._predictor._head  # type: ignore[attr-defined]
    return network


def test_a_recurrent_head_goes_on_from_its_own_state_and_the_token_that_came(tmp_path: Path) -> None:
    """One that is surer than the fixture's, so that more than one token on is likely."""
    folder = altered(tmp_path, "mlp_speculator", sharper)
    block = going_on(network_of(a_method("mlp_speculator", folder)), (), SPECULATOR.width)
    for verified in range(SPECULATOR.width + 1):
        method = a_method("mlp_speculator", folder)
        method.open(an_open(tokens=SPECULATOR.tokens))
        method.states("s", 0, SPECULATOR.rows)
        found = asked_ahead(method, ahead_of(SPECULATOR.tokens, DraftTree.chain(block[:verified])))
        for proposal in found:
            assert proposal.tokens == going_on(network_of(method), proposal.outcome, len(proposal.tokens))
        expected = (*block[:verified], going_on(network_of(method), block[:verified], 1)[0])
        assert expected in {proposal.outcome for proposal in found}, "all of it, and what its own state says then"
        assert max(len(proposal.tokens) for proposal in found) == MOST


def test_a_step_of_its_own_is_the_last_one_again_beyond_the_last() -> None:
    network = network_of(SPECULATOR.method())
    state = torch.randn(2, network.config.inner, generator=torch.Generator().manual_seed(1))
    one, other = (network.predict_next(state, [3, 5], depth) for depth in (SPECULATOR.width - 1, SPECULATOR.width + 4))
    assert torch.equal(one.logits, other.logits)
    assert network.config.reach(7) == SPECULATOR.width


def test_what_stands_beside_the_main_path_is_followed_too(head: Head) -> None:
    method = head.method()
    (proposal,) = method.draft([a_request(head.tokens, 8, Shape.TREE)])
    beside = set(proposal.tree.off_main_path[:4])
    assert beside
    found = asked_ahead(method, ahead_of(head.tokens, proposal.tree, chances=proposal.chances))
    after = [each for each in found if each.outcome[:-1] in beside]
    assert after
    for each in after:
        if head is SPECULATOR:
            assert each.tokens == going_on(network_of(method), each.outcome, len(each.tokens))
        else:
            assert each.tokens == block_of(head, head.width)[len(each.outcome) :][:MOST]


def test_blocks_ahead_are_trees_where_trees_are_taken(head: Head) -> None:
    found = asked_ahead(head.method(), ahead_of(head.tokens, NO_TREE, 8, Shape.TREE))
    trees = [proposal.tree for proposal in found if not proposal.tree.is_chain]
    assert trees
    chains = {each.outcome: each.tokens for each in asked_ahead(head.method(), ahead_of(head.tokens, NO_TREE, 8))}
    assert all(each.tree.main_path[0] == chains[each.outcome][0] for each in found)


# ---------------------------------------------------------------- the target's states take their place


def after_a_hit(head: Head, changes: dict[str, object]) -> tuple[StateReading, tuple[int, ...], Tensor]:
    """A verdict was foreseen, and its states, which nobody foresaw, have come."""
    method = head.method(**changes)
    guess = max(asked_ahead(method, ahead_of(head.tokens, NO_TREE)), key=lambda each: each.chance)
    method.committed("s", guess.outcome)
    rows = 2 * torch.randn(1, head.rows.shape[-1], generator=torch.Generator().manual_seed(3))
    method.states("s", len(head.tokens) - 1, rows)
    return method, (*head.tokens, *guess.outcome), torch.cat([head.rows, rows])


@pytest.mark.parametrize("changes", [{}, REJECTION], ids=["greedy", "rejection"])
def test_once_the_true_states_are_there_nothing_is_left_of_its_own(head: Head, changes: dict[str, object]) -> None:
    """Blocks, and those ahead of further verdicts, are those of a drafter that comes new to the session."""
    method, tokens, rows = after_a_hit(head, changes)
    other = a_method(head.name, checkpoint(head.name))
    other.open(an_open(tokens=tokens, prompt_len=len(head.tokens), **changes))
    other.states("s", 0, rows)
    request = ahead_of(tokens, DraftTree.chain((7, 11)))
    foreseen = asked_ahead(method, request)
    assert foreseen
    assert [(each.outcome, each.tree) for each in foreseen] == [
        (each.outcome, each.tree) for each in asked_ahead(other, request)
    ]
    assert method.draft([a_request(tokens, MOST)])[0].tree == other.draft([a_request(tokens, MOST)])[0].tree


def test_under_ratio_a_prefix_has_one_block_ahead_of_it(head: Head) -> None:
    """The block carries the probabilities that its tokens were drawn from."""
    request = ahead_of(head.tokens, DraftTree.chain((7,)))
    method = head.method(**REJECTION)
    found = asked_ahead(method, request)
    assert found
    assert asked_ahead(method, request) == found
    for proposal in found:
        assert len(proposal.tokens) == min(MOST, method._predictor.reach(len(proposal.outcome)))  # type: ignore[attr-defined]
        assert proposal.tree.probs is not None
        assert all(token in ids for token, ids in zip(proposal.tokens, proposal.tree.probs.token_ids, strict=True))


# ---------------------------------------------------------------- nothing


def test_without_its_states_nothing_is_drafted_and_a_target_that_goes_on_is_told(head: Head) -> None:
    method = a_method(head.name, checkpoint(head.name))
    method.open(an_open(tokens=head.tokens))
    nothing = Proposal("s", len(head.tokens), Prefix(KEY, head.tokens).hash, NO_TREE)
    assert asked_ahead(method, ahead_of(head.tokens, NO_TREE)) == [nothing]
    assert asked_ahead(method, ahead_of(head.tokens, DraftTree.chain((5,)))) == []


def test_an_interruption_ends_it(head: Head) -> None:
    request = ahead_of(head.tokens, DraftTree.chain((5,)))
    assert asked_ahead(head.method(), request, after_checks(0)) == []
    whole = asked_ahead(head.method(), request)
    for checks in range(1, 12):
        part = asked_ahead(head.method(), request, after_checks(checks))
        known = {proposal.outcome: proposal for proposal in whole}
        assert all(each.tokens == known[each.outcome].tokens[: len(each.tokens)] for each in part)


@pytest.mark.parametrize("changes", [{}, REJECTION], ids=["greedy", "rejection"])
@pytest.mark.parametrize("shape", Shape)
def test_states_that_are_not_finite_bring_nothing(head: Head, changes: dict[str, object], shape: Shape) -> None:
    method = a_method(head.name, checkpoint(head.name))
    method.open(an_open(tokens=head.tokens, **changes))
    method.states("s", 0, torch.full_like(head.rows, torch.nan))
    (proposal,) = method.draft([a_request(head.tokens, MOST, shape)])
    assert proposal.tree == NO_TREE
    found = asked_ahead(method, ahead_of(head.tokens, DraftTree.chain((1, 2)), shape=shape))
    assert not any(proposal.tokens for proposal in found)
