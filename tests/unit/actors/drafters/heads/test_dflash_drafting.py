"""DFlash as a method: which states it waits for, what it offers of a block, and rounds one after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.drafters.heads.dflash.drafting import MOST_EARLY, DFlashContext
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.heads.eagle_fixtures import altered, case, checkpoint
from tests.unit.actors.drafters.heads.state_drafting import TOP_K, StateReading, a_method, a_request, decided, drafted
from tests.unit.cluster.samples import KEY, an_open

KNOWN = case("dflash")
FEATURES = KNOWN["features"]
TOKENS = decided(KNOWN, "anchor")
BLOCK = tuple(KNOWN["draft_tokens"].tolist())


@pytest.fixture(scope="module")
def method() -> StateReading:
    return a_method("dflash", checkpoint("dflash"))


@pytest.mark.parametrize("name", ["dflash", "dflash_speculators"])
def test_it_drafts_the_reference_s_tokens(name: str) -> None:
    known = case(name)
    tokens = decided(known, "anchor")
    proposal = drafted(
        a_method(name.partition("_")[0], checkpoint(name)), tokens, 0, known["features"], a_request(tokens)
    )
    assert proposal.tree == DraftTree.chain(tuple(known["draft_tokens"].tolist()))


def test_what_is_asked_for_is_the_beginning_of_a_whole_block(method: StateReading) -> None:
    assert drafted(method, TOKENS, 0, FEATURES, a_request(TOKENS, most=2)).tokens == BLOCK[:2]
    assert method.tokens_per_forward == 4


def test_a_second_round_goes_on_from_the_first(method: StateReading) -> None:
    """The state of the block's first place came too, before the anchor was known to be followed by it."""
    later = (*KNOWN["step2_ids"].tolist(), int(KNOWN["step2_anchor"]))
    method.open(an_open(tokens=TOKENS))
    method.states("s", 0, FEATURES)
    method.states("s", 12, KNOWN["step2_features"][:1])
    (first,) = method.draft([a_request(TOKENS)])
    method.committed("s", later[len(TOKENS) :])
    method.states("s", 13, KNOWN["step2_features"][1:])
    (second,) = method.draft([a_request(later)])
    method.close(["s"])
    assert first.tokens == BLOCK
    assert second.tokens == tuple(KNOWN["step2_draft_tokens"].tolist())


def test_states_come_in_any_order_and_twice(method: StateReading) -> None:
    method.open(an_open(tokens=TOKENS))
    for first, end in ((8, 12), (3, 6), (0, 4), (2, 9), (0, 12)):
        method.states("s", first, FEATURES[first:end])
    (proposal,) = method.draft([a_request(TOKENS)])
    method.close(["s"])
    assert proposal.tokens == BLOCK


@pytest.mark.parametrize("missing", [0, 5, 11])
def test_a_session_of_which_a_state_is_missing_gets_nothing(method: StateReading, missing: int) -> None:
    """It waits for the state, and another session of the same pass does not."""
    for name in ("gap", "whole"):
        method.open(an_open(name, tokens=TOKENS))
    method.states("whole", 0, FEATURES)
    method.states("gap", 0, FEATURES[:missing])
    method.states("gap", missing + 1, FEATURES[missing + 1 :])
    requests = [a_request(TOKENS, session=name) for name in ("gap", "whole")]
    found = method.draft(requests)
    assert found[0] == Proposal("gap", len(TOKENS), Prefix(KEY, TOKENS).hash, NO_TREE)
    assert found[1].tokens == BLOCK
    method.states("gap", missing, FEATURES[missing : missing + 1])
    assert [proposal.tokens for proposal in method.draft(requests)] == [BLOCK, BLOCK]
    method.close(["gap", "whole"])


def test_a_session_that_is_opened_again_begins_without_states(method: StateReading) -> None:
    method.states("s", 0, FEATURES)
    method.open(an_open(tokens=TOKENS))
    assert method.draft([a_request(TOKENS)])[0].tokens == ()
    method.states("s", 0, FEATURES)
    method.open(an_open(tokens=TOKENS))
    assert method.draft([a_request(TOKENS)])[0].tokens == ()
    method.close(["s"])


def test_pieces_after_a_gap_are_bounded() -> None:
    context = DFlashContext()
    for first in range(1, 3 * MOST_EARLY):
        context.put(first, torch.zeros(1, 2))
    context.put(0, torch.zeros(1, 2))
    assert context.has(MOST_EARLY)
    assert not context.has(MOST_EARLY + 2)


def test_a_tree_has_the_likeliest_tokens_of_each_place(method: StateReading) -> None:
    tree = drafted(method, TOKENS, 0, FEATURES, a_request(TOKENS, 12, Shape.TREE)).tree
    assert tree.depth <= 4
    assert not tree.is_chain
    for node, depth in enumerate(tree.depths):
        assert tree.tokens[node] in KNOWN["logits"][depth].topk(4).indices.tolist()


def test_under_ratio_a_block_is_drawn_from_what_is_sent(method: StateReading) -> None:
    changes = {"sampling": Sampling(), "acceptance": Acceptance.REJECTION}
    proposal = drafted(method, TOKENS, 0, FEATURES, a_request(TOKENS, 4, Shape.TREE, least=0.9), **changes)
    assert proposal.tree.is_chain
    assert len(proposal.tokens) == 4
    assert proposal.tree.probs is not None
    for place, token in enumerate(proposal.tokens):
        ids = proposal.tree.probs.token_ids[place]
        assert list(ids) == KNOWN["logits"][place].topk(TOP_K).indices.tolist()
        assert token in ids


@pytest.mark.parametrize(("window", "begin", "is_same"), [(4, 9, True), (4, 10, False), (6, 6, True)])
def test_where_every_layer_has_a_window_states_before_it_change_nothing(
    tmp_path: Path, window: int, begin: int, is_same: bool
) -> None:
    """The anchor is at position 12. Also in a second round, which goes on from the first."""
    config = {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    sliding: Any = a_method("dflash", altered(tmp_path, "dflash", **config))
    assert sliding.needs.sees == window
    later = (*KNOWN["step2_ids"].tolist(), int(KNOWN["step2_anchor"]))
    blocks = []
    for first in (0, begin):
        sliding.open(an_open(tokens=TOKENS))
        sliding.begin("s", first)
        sliding.states("s", first, FEATURES[first:])
        hidden = sliding._predictor
        (one,) = sliding.draft([a_request(TOKENS)])
        made = hidden._blocks["s"][1].clone()
        sliding.committed("s", later[len(TOKENS) :])
        sliding.states("s", 12, KNOWN["step2_features"])
        (two,) = sliding.draft([a_request(later)])
        blocks.append((made, hidden._blocks["s"][1].clone(), one, two))
        sliding.close(["s"])
    whole, late = blocks
    assert torch.allclose(whole[0], late[0], atol=1e-6) is is_same
    assert torch.allclose(whole[1], late[1], atol=1e-6)
    assert (whole[2], whole[3]) == (late[2], late[3]) or not is_same


def test_a_layer_without_a_window_sees_all_of_the_text(method: StateReading) -> None:
    assert method.needs.sees is None


def test_windows_see_what_they_would_if_all_were_computed_at_once(tmp_path: Path) -> None:
    """Runs until the text exceeds a window."""
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    sliding = a_method("dflash", altered(tmp_path, "dflash", **config))
    sliding.open(an_open(tokens=TOKENS[:3]))
    sliding.states("s", 0, FEATURES)
    for length in range(3, len(TOKENS) + 1):
        (proposal,) = sliding.draft([a_request(TOKENS[:length])])
        sliding.committed("s", TOKENS[length : length + 1])
    sliding.close(["s"])
    assert proposal == drafted(sliding, TOKENS, 0, FEATURES, a_request(TOKENS))
