"""Medusa heads: every published layout against the reference's logits, and which files are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.drafters.heads.medusa import MedusaHeads, load_medusa
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    TOLERANCE,
    Change,
    altered,
    case,
    checkpoint,
    off_by,
)
from tests.unit.actors.drafters.heads.state_drafting import ALL_TOKENS

CASE = case("medusa")
FEATURES = CASE["features"]
Tensors = dict[str, Tensor]


def loaded(folder: Path, proposable: Any = ALL_TOKENS, target: Path = TARGET) -> MedusaHeads:
    return load_medusa(folder, target, torch.float32, CPU, proposable)


def logits(heads: MedusaHeads, states: Tensor = FEATURES) -> Tensor:
    """(heads, rows, columns)."""
    return torch.stack(
        [heads.predict_next(states, [0] * len(states), depth).logits for depth in range(heads.config.width)]
    )


def test_the_heads_say_what_the_reference_says() -> None:
    """Its configuration says two heads, as published ones do whose files hold five."""
    heads = loaded(checkpoint("medusa"))
    assert heads.config.width == 5
    assert off_by(logits(heads), CASE["medusa_logits_all"]) < TOLERANCE
    assert off_by(logits(heads)[:, -1], CASE["medusa_logits_last"]) < TOLERANCE
    assert (heads.config.needs.layers, heads.config.needs.width) == ((8,), 32)
    assert heads.config.describe()[1] == "reads the target's state 8, its final one, 32 elements"


def test_another_state_of_the_target_would_be_noticed() -> None:
    unnormed = case("target")["hs_7"]
    assert off_by(logits(loaded(checkpoint("medusa")), unnormed), CASE["medusa_logits_all"]) > 0.05


def merged(tensors: Tensors) -> Tensors:
    base = {"model.embed_tokens.weight": torch.zeros(96, 32), "lm_head.weight": torch.zeros(96, 32)}
    return base | {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}


def as_vllm(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        head, place, rest = name.split(".", 2)
        found[
            f"blocks.{head}.layers.0.{rest.removeprefix('linear.')}" if place == "0" else f"lm_heads.{head}.{rest}"
        ] = tensor
    return found


def prefixed(tensors: Tensors) -> Tensors:
    return {f"medusa_heads.{name}": tensor for name, tensor in as_vllm(tensors).items()}


@pytest.mark.parametrize("layout", [merged, as_vllm, prefixed], ids=lambda layout: layout.__name__)
def test_other_layouts_of_the_same_heads(tmp_path: Path, layout: Change) -> None:
    heads = loaded(altered(tmp_path, "medusa", layout))
    assert off_by(logits(heads), CASE["medusa_logits_all"]) < TOLERANCE


MAP = torch.tensor([5, 90, 17, 3])


def truncated(tensors: Tensors) -> Tensors:
    found = {name: tensor[MAP] if "lm_heads" in name else tensor for name, tensor in as_vllm(tensors).items()}
    return found | {"token_map": MAP}


def test_a_smaller_vocabulary_is_mapped_to_the_target_s(tmp_path: Path) -> None:
    heads = loaded(altered(tmp_path, "medusa", truncated))
    assert torch.equal(heads.token_ids, MAP)
    assert off_by(logits(heads), CASE["medusa_logits_all"][..., MAP]) < TOLERANCE


def test_only_proposable_tokens_are_predicted(tmp_path: Path) -> None:
    heads = loaded(checkpoint("medusa"), proposable={3, 5, 95, 200})
    assert heads.token_ids.tolist() == [3, 5, 95]
    assert off_by(logits(heads), CASE["medusa_logits_all"][..., [3, 5, 95]]) < TOLERANCE
    heads = loaded(altered(tmp_path, "medusa", truncated), proposable={3, 5})
    assert heads.token_ids.tolist() == [5, 3]


def with_two_blocks(tensors: Tensors) -> Tensors:
    """One module twice, as the reference makes them."""
    found = {}
    for name, tensor in tensors.items():
        head, place, rest = name.split(".", 2)
        found[name if place == "0" else f"{head}.2.{rest}"] = tensor
        if place == "0":
            found[f"{head}.1.{rest}"] = tensor.clone()
    return found


def saved_once(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in with_two_blocks(tensors).items() if ".1." not in name}


@pytest.mark.parametrize("layout", [with_two_blocks, saved_once], ids=lambda layout: layout.__name__)
def test_the_blocks_of_a_head_follow_one_another(tmp_path: Path, layout: Change) -> None:
    heads = loaded(altered(tmp_path, "medusa", layout))
    assert heads.config.blocks == 2
    tensors = torch.load(checkpoint("medusa") / "medusa_lm_head.pt", weights_only=True)
    for head in range(5):
        hidden = FEATURES
        for _ in range(2):
            hidden = hidden + F.silu(hidden @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"])
        assert off_by(logits(heads)[head], hidden @ tensors[f"{head}.1.weight"].T) < TOLERANCE


def test_blocks_need_no_bias(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in as_vllm(tensors).items() if not name.endswith("bias")}

    def zero(tensors: Tensors) -> Tensors:
        return {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}

    (tmp_path / "without").mkdir()
    (tmp_path / "zero").mkdir()
    found = logits(loaded(altered(tmp_path / "without", "medusa", without)))
    assert off_by(found, logits(loaded(altered(tmp_path / "zero", "medusa", zero)))) < TOLERANCE
    assert off_by(found, CASE["medusa_logits_all"]) > 0.01


@pytest.mark.parametrize("is_stored", [True, False])
def test_heads_may_share_the_target_s_lm_head(tmp_path: Path, is_stored: bool) -> None:
    target = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))

    def shared(tensors: Tensors) -> Tensors:
        found = {name: tensor for name, tensor in as_vllm(tensors).items() if "lm_heads" not in name}
        return found | ({"lm_head.weight": target} if is_stored else {})

    heads = loaded(altered(tmp_path, "medusa", shared, original_lm_head=True))
    if not is_stored:
        base = logits(heads)[0]
        without_blocks = CASE["base_logits_last"]
        assert base.shape[-1] == len(without_blocks)
        zeroed = altered(tmp_path, "medusa", lambda t: {n: 0 * x for n, x in shared(t).items()}, original_lm_head=True)
        assert off_by(logits(loaded(zeroed))[3, -1], without_blocks) < TOLERANCE, "with blocks that add nothing"
    else:
        tensors = torch.load(checkpoint("medusa") / "medusa_lm_head.pt", weights_only=True)
        hidden = FEATURES + F.silu(FEATURES @ tensors["2.0.linear.weight"].T + tensors["2.0.linear.bias"])
        assert off_by(logits(heads)[2], hidden @ target.T) < TOLERANCE


def dropping(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dropping("2."), r"Medusa heads \[0, 1, 3, 4\], expected 0, 1, ... without a gap"),
        (dropping(""), "holds no tensors"),
        (lambda tensors: {"fc.weight": torch.zeros(2)}, r"Medusa heads \[\], expected"),
        (
            lambda tensors: {k: t[..., :16] for k, t in tensors.items()},
            "states of 16 elements, but the target's have 32",
        ),
        (dropping("3.0"), r"no tensor 3\.0\.linear\.weight"),
        (
            lambda tensors: truncated(tensors) | {"token_map": MAP[:3]},
            "token_map .* has 3 tokens, expected one for each of 4",
        ),
        (lambda tensors: truncated(tensors) | {"token_map": MAP + 10}, "expected different ids below 96"),
        (lambda tensors: tensors | {"1.1.weight": torch.zeros(90, 32)}, r"LM head of head 1 .* \(90, 32\), expected"),
    ],
    ids=["a gap", "nothing", "something else", "another target", "a block", "map's length", "map's ids", "columns"],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, change: Change, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(altered(tmp_path, "medusa", change))


def test_heads_that_predict_nothing_of_the_target_s_are_refused() -> None:
    with pytest.raises(ModelError, match="predicts none of the target's tokens"):
        loaded(checkpoint("medusa"), proposable={100})
