"""MLPSpeculator: the reference's logits, each published option, and which files are refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.drafters.heads.mlp_speculator import MlpSpeculator, load_mlp_speculator
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

CASE = case("mlp_speculator")
Tensors = dict[str, Tensor]


def loaded(folder: Path, proposable: Any = ALL_TOKENS) -> MlpSpeculator:
    return load_mlp_speculator(folder, TARGET, torch.float32, CPU, proposable)


def chain(head: MlpSpeculator, feature: Tensor = CASE["features"]) -> tuple[Tensor, list[int]]:
    """Logits (steps, columns), and the greedy tokens."""
    state = feature.unsqueeze(0)
    token = int(CASE["next_token"])
    logits = []
    tokens = []
    for depth in range(head.config.width):
        output = head.predict_next(state, [token], depth)
        assert output.hidden is not None
        state = output.hidden
        token = int(head.token_ids[output.logits[0].argmax()])
        logits.append(output.logits[0])
        tokens.append(token)
    return torch.stack(logits), tokens


def test_it_says_what_the_reference_says() -> None:
    head = loaded(checkpoint("mlp_speculator"))
    logits, tokens = chain(head)
    assert off_by(logits, CASE["chain_logits"]) < TOLERANCE
    assert tokens == CASE["chain_tokens"].tolist()
    assert (head.config.width, head.config.needs.layers, head.config.needs.width) == (3, (8,), 32)
    assert head.config.describe()[0] == "MLPSpeculator of 3 steps with weights of their own, 24 wide"


def test_rows_do_not_depend_on_one_another() -> None:
    head = loaded(checkpoint("mlp_speculator"))
    states = torch.stack([torch.zeros(32), CASE["features"]])
    both = head.predict_next(states, [7, int(CASE["next_token"])], 0)
    assert off_by(both.logits[1], CASE["chain_logits"][0]) < TOLERANCE


def test_names_need_no_prefix(tmp_path: Path) -> None:
    def bare(tensors: Tensors) -> Tensors:
        return {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}

    logits, _ = chain(loaded(altered(tmp_path, "mlp_speculator", bare)))
    assert off_by(logits, CASE["chain_logits"]) < TOLERANCE


def restated(tensors: Tensors, scales: bool, tokens: list[int]) -> Tensor:
    """The forward over tied weights, written out again."""
    weights = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    state = CASE["features"]
    if scales:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    share = 0.5 ** (0.5 / 3)
    logits = []
    for step, token in enumerate([int(CASE["next_token"]), *tokens[:2]]):
        mixed = weights[f"proj.{min(step, 1)}.weight"] @ state * share
        mixed = mixed + weights["emb.0.weight"][token] * math.sqrt((1 - share**2) * 24 / 2)
        mixed = mixed / (mixed.square().mean() + 1e-6).sqrt() * weights["ln.0.weight"] + weights["ln.0.bias"]
        state = mixed * (1 + torch.erf(mixed / math.sqrt(2))) / 2
        logits.append(weights["head.0.weight"] @ state)
    return torch.stack(logits)


def tied(tensors: Tensors) -> Tensors:
    """Saves tensors as the reference does: under every step's name."""
    ones = {"emb": 0, "head": 0, "ln": 0}
    found = {}
    for name in tensors:
        prefix, kind, step, rest = name.split(".", 3)
        source = ones.get(kind, min(int(step), 1))
        found[name] = tensors[f"{prefix}.{kind}.{source}.{rest}"].clone()
    return found


def tied_once(tensors: Tensors) -> Tensors:
    """Saves tensors without the copies."""
    kept = ("emb.0", "head.0", "ln.0", "proj.0", "proj.1")
    return {name: tensor for name, tensor in tied(tensors).items() if name.removeprefix("speculator.").startswith(kept)}


@pytest.mark.parametrize("key", ["tie_weights", "tie_wts"])
@pytest.mark.parametrize("layout", [tied, tied_once], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("scales", [False, True], ids=["as it comes", "scaled input"])
def test_tied_weights_and_a_scaled_input(tmp_path: Path, layout: Change, scales: bool, key: str) -> None:
    changes = {key: True, "scale_input": scales}
    head = loaded(altered(tmp_path, "mlp_speculator", layout, drop=("tie_weights",), **changes))
    logits, tokens = chain(head)
    given: Tensors = {}
    altered(tmp_path, "mlp_speculator", lambda tensors: given.update(tensors) or tensors)
    assert off_by(logits, restated(given, scales, tokens)) < TOLERANCE
    assert off_by(logits, restated(given, not scales, tokens)) > 0.01


def test_only_proposable_tokens_are_predicted() -> None:
    head = load_mlp_speculator(checkpoint("mlp_speculator"), TARGET, torch.float32, CPU, {3, 95})
    assert head.token_ids.tolist() == [3, 95]
    output = head.predict_next(CASE["features"].unsqueeze(0), [int(CASE["next_token"])], 0)
    assert off_by(output.logits[0], CASE["chain_logits"][0, [3, 95]]) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        (lambda tensors: {"fc.weight": torch.zeros(2)}, {}, "holds no MLPSpeculator"),
        (dict, {"n_predict": 4}, "n_predict 4 and 3 embeddings"),
        (dict, {"n_predict": 0}, "n_predict 0 and 3 embeddings"),
        (
            lambda t: t | {"speculator.proj.0.weight": torch.zeros(24, 16)},
            {},
            "states of 16 elements.* target's have 32",
        ),
        (
            lambda t: t | {"speculator.ln.1.bias": torch.zeros(23)},
            {},
            r"ln\.1\.bias .* shape \(23,\), expected \(24,\)",
        ),
        (tied_once, {"tie_weights": False}, "n_predict 3 and 1 embeddings"),
        (
            lambda t: {k: torch.cat([x, x]) if "emb" in k else x for k, x in t.items()},
            {},
            "192 tokens, expected at most 96",
        ),
        (
            lambda t: {k: x[:90] if len(x) == 96 else x for k, x in t.items()},
            {},
            "90 tokens, but the target's ids go up to 95",
        ),
    ],
    ids=["something else", "too few", "no step", "another target", "a shape", "not tied", "too large", "too small"],
)
def test_speculators_that_do_not_fit_are_refused(
    tmp_path: Path, change: Change, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(altered(tmp_path, "mlp_speculator", change, **config))
