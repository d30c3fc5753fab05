"""Layer skip as a method: made by the registry from the target's own folder."""

from pathlib import Path

import numpy as np
import pytest

from actors.drafters.registry import DraftSetup, create_method
from cluster.config import CacheConfig, DraftPool
from cluster.config_sections import LayerSkipOptions
from cluster.drafting.method import DraftingMethod
from cluster.errors import ModelError
from tests.unit.actors.drafters.drafting import a_want
from tests.unit.actors.drafters.drafting_requests import propose

HEADS = Path(__file__).parents[3] / "data" / "heads"
CASE = np.load(HEADS / "layer_skip" / "case.npz")


def layer_skip(layers: int | tuple[int, ...]) -> DraftingMethod:
    vocabulary = {token: str(token) for token in range(96)}
    draft = DraftPool(
        method="layer_skip", layer_skip=LayerSkipOptions(layers=layers), cache=CacheConfig(page_size=4, gib=0.001)
    )
    return create_method(draft, DraftSetup("float32", 64, 5, vocabulary, str(HEADS / "target")))


def test_it_drafts_what_the_reference_drafts() -> None:
    tokens = (*CASE["input_ids"].tolist(), int(CASE["next_token"]))
    expected = tuple(CASE["chain_tokens"].tolist())
    for layers in (3, (0, 1, 2)):
        (proposal,) = propose(layer_skip(layers), [a_want(tokens, max_tokens=5)])
        assert proposal.tokens == expected
    (other,) = propose(layer_skip((0, 1, 7)), [a_want(tokens, max_tokens=5)])
    assert other.tokens != expected


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match="layers 0 to 7, but layers 9 are asked for"):
        layer_skip((0, 9))
