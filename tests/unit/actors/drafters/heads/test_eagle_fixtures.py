"""Compares published EAGLE layouts with their original code, and shows that each wrong convention is detected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.drafters.heads.eagle.config import EagleOverrides, LayerIdMeaning, OutputNorm
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    HEADS,
    TOLERANCE,
    Case,
    Change,
    Drive,
    altered,
    case,
    checkpoint,
    loaded,
    off_by,
)

EXTENDED = ("eagle1", "eagle3")  # references with second rounds and trees
SHOWS = 0.01  # minimum logit change of a wrong convention


@pytest.fixture(params=HEADS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---------------------------------------------------------------- agreement with the reference


def test_the_states_that_are_read_are_the_ones_that_the_reference_taps(name):
    """The states of the resolved layer ids equal the reference's features."""
    head = loaded(checkpoint(name))
    target = case("target")
    states = torch.cat([target[f"hs_{k}"] for k in head.config.needs.layers], dim=-1)
    assert states.shape[-1] == head.config.needs.width
    torch.testing.assert_close(states, case(name)["features"], atol=TOLERANCE, rtol=0)


def test_a_prompt_and_a_chain(name):
    known = case(name)
    drive = Drive(loaded(checkpoint(name)))
    read = drive.prefill(known)
    assert read.hidden is not None
    prefill = known["prefill_hidden"] if "prefill_hidden" in known else known["prefill_pre_norm"]
    assert off_by(read.hidden, prefill) < TOLERANCE
    tokens, logits, hidden = drive.chain(read, len(known["input_ids"]), 5)
    assert off_by(logits, known["chain_logits"]) < TOLERANCE
    assert off_by(hidden, known["chain_hidden"]) < TOLERANCE
    assert tokens.tolist() == known["chain_tokens"].tolist()


@pytest.mark.parametrize("name", EXTENDED)
def test_a_second_round_feeds_the_accepted_tokens_again_with_true_states(name):
    known = case(name)
    drive = Drive(loaded(checkpoint(name)))
    length = len(known["input_ids"])
    drive.chain(drive.prefill(known), length, 5)
    new = known["extend_ids"][length + 1 :]
    read = drive.feed(new, drive.head.inputs(known["extend_features"]), length)
    tokens, logits, hidden = drive.chain(read, length + len(new), 5)
    assert off_by(logits, known["extend_chain_logits"]) < TOLERANCE
    assert off_by(hidden, known["extend_chain_hidden"]) < TOLERANCE
    assert tokens.tolist() == known["extend_chain_tokens"].tolist()


class Node(NamedTuple):
    """Candidate node of the dynamic tree."""

    path: tuple[int, ...]
    score: float
    parent: int  # index of its parent among the fed nodes
    state: Tensor  # input state


def grown_tree(drive: Drive, known: Case) -> set[tuple[int, ...]]:
    """Returns the paths of EAGLE-2's tree: beams of width `tree_top_k`, pruned to the best `tree_nodes` candidates.

    Each forward pass feeds all levels so far as one row with a tree.
    """
    top_k = int(known["tree_top_k"])
    start = len(known["input_ids"])
    read = drive.prefill(known)
    assert read.hidden is not None
    candidates = children(drive, read.logits[-1], Node((), 0.0, -1, read.hidden[-1]), -1, read.hidden[-1], top_k)
    beam = candidates
    fed: list[Node] = []
    for _ in range(int(known["tree_depth"])):
        first = len(fed)
        fed += beam
        tokens = torch.tensor([node.path[-1] for node in fed])
        states = torch.stack([node.state for node in fed])
        read = drive.feed(tokens, states, start, len(beam), tuple(node.parent for node in fed))
        assert read.hidden is not None
        level = [
            child
            for place, node in enumerate(beam)
            for child in children(drive, read.logits[place], node, first + place, read.hidden[place], top_k)
        ]
        candidates = candidates + level
        beam = sorted(level, key=lambda node: -node.score)[:top_k]
    best = sorted(candidates, key=lambda node: -node.score)[: int(known["tree_nodes"])]
    return {node.path for node in best}


def children(drive: Drive, logits: Tensor, node: Node, place: int, state: Tensor, count: int) -> list[Node]:
    log_probs, columns = torch.log_softmax(logits, dim=-1).topk(count)
    tokens = drive.head.token_ids[columns].tolist()
    likeliest = zip(tokens, log_probs.tolist(), strict=True)
    return [Node((*node.path, token), node.score + log_prob, place, state) for token, log_prob in likeliest]


@pytest.mark.parametrize("name", EXTENDED)
def test_a_dynamic_tree(name):
    known = case(name)
    tokens = known["tree_tokens"]
    paths = set()
    for node in range(1, len(tokens)):
        above = known["tree_mask"][node].nonzero().flatten().tolist()
        on_path = sorted(above, key=lambda other: int(known["tree_position_ids"][other]))
        assert on_path[0] == 0, "the first is the token that the tree comes after"
        paths.add(tuple(tokens[on_path[1:]].tolist()))
    assert grown_tree(Drive(loaded(checkpoint(name))), known) == paths


def test_rows_of_several_sequences_do_not_see_each_other(name):
    """Two sequences of different lengths run in one forward pass on separate pages."""
    known = case(name)
    drive = Drive(loaded(checkpoint(name)))
    alone = drive.prefill(known)
    tokens = torch.cat([known["input_ids"][1:], known["next_token"].reshape(1)])
    states = drive.head.inputs(known["features"])
    long = InputRow(tuple(tokens.tolist()), 0, 12, (9, 3, 7), states=states)
    short = InputRow(tuple(tokens[:5].tolist()), 0, 5, (4, 11), states=states[:5])
    both = drive.runner.forward([long, short])
    assert off_by(both.logits[:12], alone.logits) < TOLERANCE
    assert off_by(both.logits[12:], alone.logits[:5]) < TOLERANCE


# ---------------------------------------------------------------- wrong conventions


def chain_off_by(known: Case, drive: Drive) -> float:
    """Returns the error of the chain's first two logits rows; the second row gets its token and our state."""
    length = len(known["input_ids"])
    read = drive.prefill(known)
    assert read.hidden is not None
    second = drive.feed(known["chain_tokens"][:1], read.hidden[-1:], length)
    return max(off_by(read.logits[-1], known["chain_logits"][0]), off_by(second.logits[0], known["chain_logits"][1]))


def swapped(*names: str) -> Change:
    """Swaps the input halves of these tensors, and so embedding and state."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {key: tensor.chunk(2, dim=-1)[::-1] for key, tensor in tensors.items() if key.endswith(names)}
        return tensors | {key: torch.cat(halves, dim=-1) for key, halves in found.items()}

    return change


def with_tensor(key: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Replaces or adds a tensor, computed from its old value or from a norm's weights."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {key: make(tensors.get(key, torch.ones(32)))}

    return change


def same(tensor: Tensor) -> Tensor:
    return tensor


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding after state": ("eagle1", {"change": swapped("fc.weight")}),
    "the usual rope base": ("eagle1", {"drop": ("rope_theta",)}),
    "another rope base in rope_parameters": ("eagle1", {"rope_parameters": {"rope_theta": 1e4}}),
    "another embedding": ("eagle1", {"change": with_tensor("embed_tokens.weight", torch.neg)}),
    "a norm before the first layer": ("eagle1", {"change": with_tensor("layers.0.input_layernorm.weight", same)}),
    "a norm before the head": ("eagle1", {"change": with_tensor("lm_head_layernorm.weight", same)}),
    "embedding after state, 3": ("eagle3", {"change": swapped(*QKV)}),
    "residual normed": ("eagle3", {"norm_before_residual": True}),
    "normed states recycled": ("eagle3", {"norm_output": True}),
    "another rope base": ("eagle3", {"rope_theta": 500000.0}),
    "another eps": ("eagle3", {"rms_norm_eps": 0.1}),
    "no weights of the states' norm": (
        "eagle3",
        {"change": with_tensor("midlayer.hidden_norm.weight", torch.ones_like)},
    ),
    "no weights of the last norm": ("eagle3", {"change": with_tensor("norm.weight", torch.ones_like)}),
    "embedding after state, speculators": ("eagle3_speculators", {"change": swapped(*QKV)}),
    "residual as it comes": ("eagle3_speculators", {"norm_before_residual": False}),
    "normed states recycled, speculators": ("eagle3_speculators", {"norm_output": True}),
    "the usual rope base, speculators": (
        "eagle3_speculators",
        {"section": "transformer_layer_config", "drop": ("rope_parameters",)},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_convention_of_the_head_shows(tmp_path: Path, wrong: str) -> None:
    name, changes = WRONG[wrong]
    known = case(name)
    assert chain_off_by(known, Drive(loaded(checkpoint(name)))) < TOLERANCE
    assert chain_off_by(known, Drive(loaded(altered(tmp_path, name, **changes)))) > SHOWS


@pytest.mark.parametrize("override", [OutputNorm.BOTH, OutputNorm.NOTHING])
def test_the_use_of_the_last_norm_can_be_overridden(override: OutputNorm) -> None:
    drive = Drive(loaded(checkpoint("eagle3"), EagleOverrides(output_norm=override)))
    assert chain_off_by(case("eagle3"), drive) > SHOWS


@pytest.mark.parametrize("name", ["eagle3", "eagle3_speculators"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_other_layers_change_drafts(name: str, shift: int) -> None:
    known = case(name)
    drive = Drive(loaded(checkpoint(name)))
    target = case("target")
    shifted = torch.cat([target[f"hs_{int(k) + shift}"] for k in known["feature_hidden_states_index"]], dim=-1)
    assert chain_off_by(known | {"features": shifted}, drive) > SHOWS


def test_ids_of_outputs_are_one_layer_later() -> None:
    head = loaded(checkpoint("eagle3_speculators"), EagleOverrides(layer_ids=LayerIdMeaning.OUTPUT))
    assert head.config.needs.layers == (3, 5, 6)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("wrong", ["features a place later", "states before the final norm or in another order"])
def test_misplaced_or_reordered_states_change_drafts(name: str, wrong: str) -> None:
    known = case(name)
    features = known["features"]
    if wrong.startswith("features"):
        other = torch.roll(features, 1, dims=0)
    else:
        other = torch.cat(features.chunk(2 if name == "eagle1" else 3, dim=-1)[::-1], dim=-1)
    assert chain_off_by(known | {"features": other}, Drive(loaded(checkpoint(name)))) > SHOWS


@pytest.mark.parametrize("name", ["eagle3", "eagle3_speculators"])
def test_the_draft_vocabulary_as_absolute_ids_is_refused(tmp_path: Path, name: str) -> None:
    def absolute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}

    with pytest.raises(ModelError, match="expected distinct ids below 96"):
        loaded(altered(tmp_path, name, absolute))


def test_tokens_that_may_not_be_proposed_have_no_column() -> None:
    known = case("eagle3")
    whole = loaded(checkpoint("eagle3"))
    proposable = set(whole.token_ids[::3].tolist()) | {96}
    some = loaded(checkpoint("eagle3"), proposable=proposable)
    assert some.token_ids.tolist() == whole.token_ids[::3].tolist()
    assert off_by(Drive(some).prefill(known).logits, Drive(whole).prefill(known).logits[:, ::3]) < TOLERANCE
