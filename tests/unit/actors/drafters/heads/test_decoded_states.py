"""Heads as a deployment has them: every method that reads states, made by the registry, takes rows as they travel."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.compute.hidden_states import decode_rows, encode_rows
from actors.drafters.registry import MODULES, state_bounds
from cluster.config import DraftPool
from cluster.config_sections import HEADS
from cluster.drafting.method import ReadsStates
from protos.messages import StateDtype
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, altered, case, checkpoint
from tests.unit.actors.drafters.heads.state_drafting import a_deployed_method, a_method, a_request, drafted
from tests.unit.cluster.samples import an_open

FIXTURES = {
    "medusa": "medusa",
    "dflash": "dflash",
    "eagle": "eagle3",
}  # the speculator's fixture has the state of one position only


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_encoded_rows_bring_what_the_same_rows_bring_as_tensors(name: str) -> None:
    folder = checkpoint(FIXTURES[name])
    known = case(FIXTURES[name])
    ids = case("target")["input_ids"][0]
    next_token = known["next_token"] if "next_token" in known else known["anchor"]
    tokens = (*ids.tolist(), int(next_token))
    method = a_deployed_method(name, folder)
    assert isinstance(method, ReadsStates)
    encoded = encode_rows(known["features"], StateDtype.BFLOAT16)
    sent = bytes(encoded.flatten().tolist())
    assert len(sent) == len(ids) * method.states_format.row_bytes
    method.open(an_open(tokens=tokens))
    (before,) = method.draft([a_request(tokens)])
    assert not before.tokens, "no state has come"
    method.states("s", 0, sent)
    (proposal,) = method.draft([a_request(tokens)])
    method.close(["s"])
    rounded = decode_rows(sent, method.states_format)
    assert torch.equal(rounded, known["features"].bfloat16().float())
    assert proposal == drafted(a_method(name, folder), tokens, 0, rounded, a_request(tokens))
    assert proposal.tokens


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_rows_that_begin_in_mid_text_bring_a_block(name: str) -> None:
    known = case(FIXTURES[name])
    ids = case("target")["input_ids"][0]
    tokens = (*ids.tolist(), int(known["next_token"] if "next_token" in known else known["anchor"]))
    method = a_deployed_method(name, checkpoint(FIXTURES[name]))
    encoded = encode_rows(known["features"], StateDtype.BFLOAT16)
    for _ in range(2):
        method.open(an_open(tokens=tokens))
        method.states("s", 5, bytes(encoded[5:8].flatten().tolist()))
        method.states("s", 8, bytes(encoded[8:].flatten().tolist()))
        (proposal,) = method.draft([a_request(tokens)])
        method.close(["s"])
        assert proposal.tokens


@pytest.mark.parametrize(
    ("name", "states", "expected"),
    [
        ("eagle", {"keep": False}, (None, 512)),
        ("eagle", {"keep": False, "window": 3}, (None, 3)),
        ("eagle", {"window": 3}, (None, None)),
        ("dflash", {"keep": False}, (None, 512)),
        ("medusa", {"keep": False}, (1, 512)),
    ],
)
def test_of_how_many_tokens_states_are_enough(name: str, states: Any, expected: tuple[int | None, int | None]) -> None:
    draft = DraftPool.model_validate({"method": name, "model": str(checkpoint(FIXTURES[name])), "states": states})
    bounds = state_bounds(draft, TARGET)
    assert (bounds.window, bounds.enough) == expected


@pytest.mark.parametrize(("window", "expected"), [(3, 3), (512, 6)])
def test_no_more_are_read_than_a_heads_layers_see(tmp_path: Path, window: int, expected: int) -> None:
    folder = altered(tmp_path, "dflash", layer_types=["sliding_attention"] * 2, sliding_window=6)
    states = {"keep": False, "window": window}
    draft = DraftPool.model_validate({"method": "dflash", "model": str(folder), "states": states})
    assert state_bounds(draft, TARGET).enough == expected


def test_every_head_can_be_deployed() -> None:
    assert MODULES.keys() >= HEADS
