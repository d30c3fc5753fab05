"""Heads in 8 bits: every product of theirs is, and what they say is nearly the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from actors.compute.linear import EightBitProjection, can_round
from actors.drafters import products
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.drafters.products import choose_products
from cluster.config import validated
from cluster.errors import ConfigError, ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, case, checkpoint
from tests.unit.actors.drafters.heads.state_drafting import ALL_TOKENS, a_deployed_method, a_request, decided
from tests.unit.cluster.samples import an_open

FIXTURES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "dflash": "dflash", "eagle": "eagle3"}
PRODUCTS = {"medusa": 5 * 2, "mlp_speculator": 3 * 2}  # at least, of the heads whose layers are few

needs_8_bits = pytest.mark.skipif(not can_round(CPU), reason="this build of torch has no products in 8 bits")


@needs_8_bits
@pytest.mark.parametrize("name", FIXTURES)
def test_every_product_of_a_deployed_head_is_in_8_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[tuple[int, ...]] = []

    class Spied(EightBitProjection):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            made.append(tuple(weight.shape))
            super().__init__(weight, bias)

    monkeypatch.setattr(products, "EightBitProjection", Spied)
    fixture = FIXTURES[name]
    method: Any = a_deployed_method(name, checkpoint(fixture), quantization="int8")
    known = case(fixture)
    tokens = decided(known, "anchor" if name == "dflash" else "next_token")
    rows = known["features"]
    method.open(an_open(tokens=tokens))
    method._method.states("s", 0, rows if rows.dim() > 1 else rows.expand(len(tokens) - 1, -1))
    (proposal,) = method.draft([a_request(tokens, 2)])
    assert proposal.tokens
    assert len(made) >= PRODUCTS.get(name, 5)


@needs_8_bits
@pytest.mark.parametrize(("name", "load"), [("medusa", load_medusa), ("mlp_speculator", load_mlp_speculator)])
def test_what_a_head_says_is_nearly_the_same(name: str, load: Any) -> None:
    """An error of one part in 127 for weights and rows each, over a sum of 32."""
    states = case("medusa")["features"]
    plain, rounded = (
        load(checkpoint(name), TARGET, torch.float32, CPU, ALL_TOKENS, *product).predict_next(states, [3] * 12, 0)
        for product in ([], [EightBitProjection])
    )
    off = (plain.logits - rounded.logits).abs().max() / plain.logits.abs().max()
    assert 0 < off < 0.05


def test_what_is_beside_products_in_8_bits_is_float32() -> None:
    assert choose_products("none", "bfloat16", CPU).dtype is torch.bfloat16
    if can_round(CPU):
        assert choose_products("int8", "bfloat16", CPU).dtype is torch.float32


def test_where_there_are_none_it_is_refused() -> None:
    with pytest.raises(ModelError, match="no products in 8 bits on meta"):
        choose_products("int8", "bfloat16", torch.device("meta"))
    gpu = {"method": "mtp", "mtp": {"quantization": "int8"}, "resources": {"num_gpus": 1}}
    with pytest.raises(ConfigError, match=r"mtp\.quantization int8 is for CPUs"):
        validated({"model": {"target": "t"}, "draft": gpu})
