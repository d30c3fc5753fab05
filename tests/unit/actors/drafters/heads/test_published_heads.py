"""Tests Medusa, MLPSpeculator and DFlash heads: agreement with the reference's logits, options and refusals."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from actors.compute.linear import Product, Projection, projection
from actors.drafters.heads.dflash.config import MASK_FILE, DFlashLayerKind, default_outputs
from actors.drafters.heads.dflash.drafting import DFlashContext, DFlashDecoder
from actors.drafters.heads.medusa import MedusaHeads
from actors.drafters.heads.mlp_speculator import MlpSpeculator
from cluster.errors import ModelError
from tests.unit.actors.drafters.drafting import ALL_TOKENS, LOADERS
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    TOLERANCE,
    Case,
    Change,
    added,
    altered,
    case,
    checkpoint,
    off_by,
    without,
)

MEDUSA = case("medusa")
SPECULATOR = case("mlp_speculator")
DFLASH = case("dflash")
HEADS = ("medusa", "mlp_speculator", "dflash", "dflash_speculators")
PROMPT = 12
SHOWS = 0.01  # minimum logit change of a wrong convention
Tensors = dict[str, Tensor]


def loaded(name: str, folder: Path | None = None, proposable: Any = ALL_TOKENS, product: Product = projection) -> Any:
    load = LOADERS[name.removesuffix("_speculators")]
    return load(folder or checkpoint(name), TARGET, torch.float32, CPU, proposable, product)


def outputs_of_products(name: str, folder: Path) -> Counter[int]:
    """Returns the number of products that a head creates, by number of outputs."""
    outputs: Counter[int] = Counter()

    def counted(weight: Tensor, bias: Tensor | None) -> Projection:
        outputs[len(weight)] += 1
        return projection(weight, bias)

    loaded(name, folder, product=counted)
    return outputs


# ---------------------------------------------------------------- agreement with the reference


def medusa_logits(heads: MedusaHeads, states: Tensor = MEDUSA["features"]) -> Tensor:
    """Returns the heads' logits, (heads, rows, columns)."""
    return torch.stack(
        [heads.predict_next(states, [0] * len(states), depth).logits for depth in range(heads.config.width)]
    )


def chain_of(head: MlpSpeculator) -> tuple[Tensor, list[int]]:
    """Returns a greedy chain's logits, (steps, columns), and tokens."""
    state = SPECULATOR["features"].unsqueeze(0)
    token = int(SPECULATOR["next_token"])
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


@torch.inference_mode()
def hidden(head: DFlashDecoder, known: Case = DFLASH, context: DFlashContext | None = None) -> Tensor:
    """Returns the hidden states of the first block, (block, hidden)."""
    context = context or DFlashContext()
    context.put(0, head.project(known["features"]))
    return head.hidden([context], [int(known["anchor"])], [PROMPT])[0]


def logits(head: Any, known: Case = DFLASH) -> Tensor:
    if isinstance(head, MedusaHeads):
        return medusa_logits(head)
    if isinstance(head, MlpSpeculator):
        return chain_of(head)[0]
    with torch.inference_mode():
        return head.logits(hidden(head, known)[1:])


def reference(name: str) -> Tensor:
    known = case(name)
    return next(known[key] for key in ("medusa_logits_all", "chain_logits", "logits") if key in known)


def is_reference(name: str, folder: Path) -> bool:
    return off_by(logits(loaded(name, folder)), reference(name)) < TOLERANCE


@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_the_reference_s_logits(name: str) -> None:
    assert off_by(logits(loaded(name), case(name)), reference(name)) < TOLERANCE


def test_greedy_tokens_and_hidden_states_are_the_reference_s() -> None:
    assert off_by(medusa_logits(loaded("medusa"))[:, -1], MEDUSA["medusa_logits_last"]) < TOLERANCE
    assert chain_of(loaded("mlp_speculator"))[1] == SPECULATOR["chain_tokens"].tolist()
    for name in ("dflash", "dflash_speculators"):
        head = loaded(name)
        known = case(name)
        assert off_by(hidden(head, known), known["block_hidden"]) < TOLERANCE
        assert torch.equal(head.token_ids[logits(head, known).argmax(dim=-1)], known["draft_tokens"])


@pytest.mark.parametrize(
    ("name", "width", "layers", "described"),
    [
        (
            "medusa",
            5,
            (8,),
            "reads the target's state 8, its final one, 32 elements",
        ),  # its configuration says 2
        ("mlp_speculator", 3, (8,), "MLPSpeculator of 3 steps with separate weights, 24 wide"),
    ],
)
def test_a_head_that_reads_the_last_state_describes_itself(name: str, width: int, layers: Any, described: str) -> None:
    config = loaded(name).config
    assert (config.width, config.needs.layers, config.needs.width) == (width, layers, 32)
    assert described in config.describe()


@pytest.mark.parametrize("name", ["dflash", "dflash_speculators"])
def test_the_states_that_are_read_are_the_ones_that_the_reference_taps(name: str) -> None:
    needs = loaded(name).config.needs
    target = case("target")
    states = torch.cat([target[f"hs_{k}"] for k in needs.layers], dim=-1)
    assert needs.width == states.shape[-1]
    assert off_by(states, case(name)["features"]) < TOLERANCE


def test_another_state_of_the_target_would_be_noticed() -> None:
    unnormed = case("target")["hs_7"]
    assert off_by(medusa_logits(loaded("medusa"), unnormed), MEDUSA["medusa_logits_all"]) > 0.05


def test_rows_do_not_depend_on_one_another() -> None:
    states = torch.stack([torch.zeros(32), SPECULATOR["features"]])
    both = loaded("mlp_speculator").predict_next(states, [7, int(SPECULATOR["next_token"])], 0)
    assert off_by(both.logits[1], SPECULATOR["chain_logits"][0]) < TOLERANCE


@pytest.mark.parametrize("name", ["medusa", "mlp_speculator", "dflash_speculators"])
def test_only_proposable_tokens_are_predicted(name: str) -> None:
    every = loaded(name).token_ids
    columns = [3, 5, 40] if name == "dflash_speculators" else [3, 5, 95]
    head = loaded(name, proposable=set(every[columns].tolist()))
    assert head.token_ids.tolist() == every[columns].tolist()
    if name == "mlp_speculator":  # further steps would get another token
        state = SPECULATOR["features"].unsqueeze(0)
        found = head.predict_next(state, [int(SPECULATOR["next_token"])], 0).logits
        assert off_by(found[0], SPECULATOR["chain_logits"][0, columns]) < TOLERANCE
    else:
        assert off_by(logits(head, case(name)), reference(name)[..., columns]) < TOLERANCE


# ---------------------------------------------------------------- equivalent layouts


def merged(tensors: Tensors) -> Tensors:
    base = {"model.embed_tokens.weight": torch.zeros(96, 32), "lm_head.weight": torch.zeros(96, 32)}
    return base | {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}


def as_vllm(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        head, place, rest = name.split(".", 2)
        if place == "0":
            found[f"blocks.{head}.layers.0.{rest.removeprefix('linear.')}"] = tensor
        else:
            found[f"lm_heads.{head}.{rest}"] = tensor
    return found


def prefixed(tensors: Tensors) -> Tensors:
    return {f"medusa_heads.{name}": tensor for name, tensor in as_vllm(tensors).items()}


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}


def with_other_names(tensors: Tensors) -> Tensors:
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    found = {}
    for name, tensor in tensors.items():
        other = next((alias + name[len(own) :] for own, alias in names.items() if name.startswith(own)), name)
        found[f"model.{other}"] = tensor
    return found


def biased(size: float) -> Change:
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 32}
    names = {f"layers.{i}.self_attn.{name}.bias": n for i in range(2) for name, n in sizes.items()}
    return lambda tensors: tensors | {name: torch.full((n,), size) for name, n in names.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("medusa", merged),
        ("medusa", as_vllm),
        ("medusa", prefixed),
        ("mlp_speculator", bare),
        ("dflash", with_other_names),
        ("dflash", biased(0.0)),
    ],
)
def test_other_layouts_of_the_same_head(tmp_path: Path, name: str, layout: Change) -> None:
    assert is_reference(name, altered(tmp_path, name, layout))


def test_projections_may_have_biases(tmp_path: Path) -> None:
    head = loaded("dflash", altered(tmp_path, "dflash", biased(0.3)))
    assert off_by(logits(head), DFLASH["logits"]) > SHOWS


# ---------------------------------------------------------------- Medusa


def test_heads_merged_with_another_model_than_the_target_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The quantization is the base model's."""
    assert is_reference("medusa", altered(tmp_path, "medusa", merged, **QUANTIZED))
    assert "set model.target to the head's folder" in caplog.text
    caplog.clear()
    loaded("medusa")
    assert not caplog.text


def test_unused_copies_of_a_shared_lm_head_are_allowed(tmp_path: Path) -> None:
    loaded("medusa", altered(tmp_path, "medusa", as_vllm, original_lm_head=True))


MAP = torch.tensor([5, 90, 17, 3])


def truncated(tensors: Tensors) -> Tensors:
    found = {name: tensor[MAP] if "lm_heads" in name else tensor for name, tensor in as_vllm(tensors).items()}
    return found | {"token_map": MAP}


def test_a_smaller_vocabulary_is_mapped_to_the_target_s(tmp_path: Path) -> None:
    heads = loaded("medusa", altered(tmp_path, "medusa", truncated))
    assert torch.equal(heads.token_ids, MAP)
    assert off_by(medusa_logits(heads), MEDUSA["medusa_logits_all"][..., MAP]) < TOLERANCE


def test_a_smaller_vocabulary_keeps_its_proposable_tokens_in_order(tmp_path: Path) -> None:
    assert loaded("medusa", altered(tmp_path, "medusa", truncated), {3, 5, 200}).token_ids.tolist() == [5, 3]


def with_two_blocks(tensors: Tensors) -> Tensors:
    """Repeats a module, like the reference."""
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
    heads = loaded("medusa", altered(tmp_path, "medusa", layout))
    assert heads.config.blocks == 2
    tensors = torch.load(checkpoint("medusa") / "medusa_lm_head.pt", weights_only=True)
    for head in range(5):
        hidden = MEDUSA["features"]
        for _ in range(2):
            hidden = hidden + F.silu(hidden @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"])
        assert off_by(medusa_logits(heads)[head], hidden @ tensors[f"{head}.1.weight"].T) < TOLERANCE


def test_blocks_need_no_bias(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in as_vllm(tensors).items() if not name.endswith("bias")}

    def zero(tensors: Tensors) -> Tensors:
        return {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}

    (tmp_path / "without").mkdir()
    (tmp_path / "zero").mkdir()
    found = medusa_logits(loaded("medusa", altered(tmp_path / "without", "medusa", without)))
    assert off_by(found, medusa_logits(loaded("medusa", altered(tmp_path / "zero", "medusa", zero)))) < TOLERANCE
    assert off_by(found, MEDUSA["medusa_logits_all"]) > 0.01


@pytest.mark.parametrize("is_stored", [True, False])
def test_heads_may_share_the_target_s_lm_head(tmp_path: Path, is_stored: bool) -> None:
    target = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))

    def shared(tensors: Tensors) -> Tensors:
        found = {name: tensor for name, tensor in as_vllm(tensors).items() if "lm_heads" not in name}
        return found | ({"lm_head.weight": target} if is_stored else {})

    heads = loaded("medusa", altered(tmp_path, "medusa", shared, original_lm_head=True))
    if not is_stored:
        base = medusa_logits(heads)[0]
        without_blocks = MEDUSA["base_logits_last"]
        assert base.shape[-1] == len(without_blocks)
        zeroed = altered(tmp_path, "medusa", lambda t: {n: 0 * x for n, x in shared(t).items()}, original_lm_head=True)
        assert off_by(medusa_logits(loaded("medusa", zeroed))[3, -1], without_blocks) < TOLERANCE, (
            "with blocks that add nothing"
        )
    else:
        tensors = torch.load(checkpoint("medusa") / "medusa_lm_head.pt", weights_only=True)
        hidden = MEDUSA["features"] + F.silu(
            MEDUSA["features"] @ tensors["2.0.linear.weight"].T + tensors["2.0.linear.bias"]
        )
        assert off_by(medusa_logits(heads)[2], hidden @ target.T) < TOLERANCE
    assert outputs_of_products("medusa", tmp_path)[96] == 1, "one in memory"


# ---------------------------------------------------------------- MLPSpeculator


def restated_speculator(tensors: Tensors, scales: bool, tokens: list[int]) -> Tensor:
    """Reimplements the forward pass over tied weights."""
    weights = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    state = SPECULATOR["features"]
    if scales:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    share = 0.5 ** (0.5 / 3)
    logits = []
    for step, token in enumerate([int(SPECULATOR["next_token"]), *tokens[:2]]):
        mixed = weights[f"proj.{min(step, 1)}.weight"] @ state * share
        mixed = mixed + weights["emb.0.weight"][token] * math.sqrt((1 - share**2) * 24 / 2)
        mixed = mixed / (mixed.square().mean() + 1e-6).sqrt() * weights["ln.0.weight"] + weights["ln.0.bias"]
        state = mixed * (1 + torch.erf(mixed / math.sqrt(2))) / 2
        logits.append(weights["head.0.weight"] @ state)
    return torch.stack(logits)


def tied(tensors: Tensors) -> Tensors:
    """Saves tensors like the reference, under every step's name."""
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
    head = loaded("mlp_speculator", altered(tmp_path, "mlp_speculator", layout, drop=("tie_weights",), **changes))
    assert outputs_of_products("mlp_speculator", tmp_path)[96] == 1, "one LM head in memory"
    found, tokens = chain_of(head)
    given: Tensors = {}
    altered(tmp_path, "mlp_speculator", lambda tensors: given.update(tensors) or tensors)
    assert off_by(found, restated_speculator(given, scales, tokens)) < TOLERANCE
    assert off_by(found, restated_speculator(given, not scales, tokens)) > 0.01


# ---------------------------------------------------------------- DFlash


@torch.inference_mode()
def test_a_second_block_comes_after_the_states_of_what_was_accepted() -> None:
    """The cache drops keys and values of the first block, and keeps those of its context."""
    head = loaded("dflash")
    context = DFlashContext()
    hidden(head, context=context)
    context.put(PROMPT, head.project(DFLASH["step2_features"]))
    found = head.hidden([context], [int(DFLASH["step2_anchor"])], [PROMPT + 3])[0]
    assert off_by(found, DFLASH["step2_block_hidden"]) < TOLERANCE
    assert off_by(head.logits(found[1:]), DFLASH["step2_logits"]) < TOLERANCE


@torch.inference_mode()
def test_sessions_of_several_lengths_are_computed_together() -> None:
    head = loaded("dflash")
    contexts = [DFlashContext() for _ in range(3)]
    for context, count in zip(contexts, (PROMPT, 5, PROMPT), strict=True):
        context.put(0, head.project(DFLASH["features"][:count]))
    head.hidden(contexts[2:], [3], [7])
    anchors = [int(DFLASH["anchor"]), 8, int(DFLASH["anchor"])]
    found = head.hidden(contexts, anchors, [PROMPT, 5, PROMPT])
    assert off_by(found[0], DFLASH["block_hidden"]) < TOLERANCE
    assert off_by(found[2], DFLASH["block_hidden"]) < TOLERANCE
    alone = DFlashContext()
    alone.put(0, head.project(DFLASH["features"][:5]))
    assert off_by(found[1], head.hidden([alone], [8], [5])[0]) < TOLERANCE


# ---------------------------------------------------------------- kinds of attention


def restated_dflash(tensors: Tensors, kinds: Sequence[DFlashLayerKind]) -> Tensor:
    """Reimplements the forward pass one query and head at a time; returns (block, hidden)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * tensors[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        angles = position / 1e6 ** (torch.arange(8) / 8)
        first, second = x.split(8)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    embedding = target_weights()["model.embed_tokens.weight"]
    states = norm(DFLASH["features"] @ tensors["fc.weight"].T, "hidden_norm")
    x = embedding[[int(DFLASH["anchor"]), 95, 95, 95, 95]]
    for index, kind in enumerate(kinds):
        layer = f"layers.{index}"
        attention = f"{layer}.self_attn"
        inputs = norm(x, f"{layer}.input_layernorm")
        rows = torch.cat([states, inputs])
        keys = norm((rows @ tensors[f"{attention}.k_proj.weight"].T).view(-1, 2, 16), f"{attention}.k_norm")
        values = (rows @ tensors[f"{attention}.v_proj.weight"].T).view(-1, 2, 16)
        queries = norm((inputs @ tensors[f"{attention}.q_proj.weight"].T).view(-1, 4, 16), f"{attention}.q_norm")
        attended = torch.zeros(5, 4, 16)
        for place in range(5):
            at = PROMPT + place
            seen = [
                k
                for k in range(PROMPT + 5)
                if (k <= at or not kind.is_causal) and (kind.window is None or abs(at - k) < kind.window)
            ]
            for head in range(4):
                query = turned(queries[place, head], at)
                scores = torch.stack([query @ turned(keys[k, head // 2], k) for k in seen]) / 4
                attended[place, head] = scores.softmax(dim=0) @ values[seen, head // 2]
        x = x + attended.flatten(1) @ tensors[f"{attention}.o_proj.weight"].T
        inputs = norm(x, f"{layer}.post_attention_layernorm")
        gate = F.silu(inputs @ tensors[f"{layer}.mlp.gate_proj.weight"].T)
        x = (
            x
            + (gate * (inputs @ tensors[f"{layer}.mlp.up_proj.weight"].T)) @ tensors[f"{layer}.mlp.down_proj.weight"].T
        )
    return norm(x, "norm")


def target_weights() -> Tensors:
    return stored(TARGET)


def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


FULL = DFlashLayerKind(is_causal=False, window=None)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NESTED = {"mask_token_id": 95, "target_layer_ids": [1, 3, 5]}


def test_the_restated_head_equals_the_reference() -> None:
    assert off_by(restated_dflash(stored(checkpoint("dflash")), (FULL, FULL)), DFLASH["block_hidden"]) < TOLERANCE


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (SLIDING, (DFlashLayerKind(True, 6), FULL)),
        (SLIDING | {"is_causal": False}, (DFlashLayerKind(False, 6), FULL)),
        (SLIDING | {"is_causal": True}, (DFlashLayerKind(True, 6), DFlashLayerKind(True, None))),
        (SLIDING | {"dflash_config": NESTED | {"causal": False}}, (DFlashLayerKind(False, 6), FULL)),
        ({"dflash_config": NESTED | {"causal": True}}, (DFlashLayerKind(True, None),) * 2),
        ({"is_causal": False, "dflash_config": NESTED | {"causal": True}}, (FULL, FULL)),
        (SLIDING | {"sliding_window_non_causal": True}, (DFlashLayerKind(False, 6), FULL)),
        (SLIDING | {"sliding_window": None, "swa_window_size": 3, "use_swa": True}, (DFlashLayerKind(True, 3), FULL)),
        ({"sliding_window": 6}, (FULL, FULL)),
    ],
    ids=[
        "sliding is causal",
        "is_causal false: both ways",
        "is_causal true: all",
        "dflash_config's causal",
        "for full layers too",
        "is_causal goes first",
        "speculators' flag",
        "the window's other name",
        "no layer slides",
    ],
)
def test_causal_layers_and_window_sizes(tmp_path: Path, config: Any, kinds: Any) -> None:
    folder = altered(tmp_path, "dflash", **config)
    head = loaded("dflash", folder)
    assert head.config.layers == kinds
    assert off_by(hidden(head), restated_dflash(stored(folder), kinds)) < TOLERANCE
    if kinds != (FULL, FULL):
        assert off_by(hidden(head), DFLASH["block_hidden"]) > SHOWS


@pytest.mark.parametrize(("window", "begin", "is_same"), [(4, 9, True), (4, 10, False), (6, 6, True)])
@torch.inference_mode()
def test_states_before_the_window_of_all_layers_have_no_effect(
    tmp_path: Path, window: int, begin: int, is_same: bool
) -> None:
    """The anchor is at position 12. This also holds in a second round that continues the first."""
    head = loaded("dflash", altered(tmp_path, "dflash", layer_types=["sliding_attention"] * 2, sliding_window=window))
    assert head.config.needs.sees == window
    rounds = []
    for first in (0, begin):
        context = DFlashContext(first)
        context.put(first, head.project(DFLASH["features"][first:]))
        one = head.hidden([context], [int(DFLASH["anchor"])], [PROMPT])
        context.put(PROMPT, head.project(DFLASH["step2_features"]))
        rounds.append((one, head.hidden([context], [int(DFLASH["step2_anchor"])], [PROMPT + 3])))
    whole, late = rounds
    assert torch.allclose(whole[0], late[0], atol=1e-6) is is_same
    assert torch.allclose(whole[1], late[1], atol=1e-6)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "section", "drop", "config", "states"),
    [
        ("dflash", "dflash_config", (), {"target_layer_ids": [0, 4, 7]}, (1, 5, 8)),
        ("dflash", "dflash_config", ("target_layer_ids",), {}, (2, 4, 6)),
        ("dflash", "", ("dflash_config",), {"target_layer_ids": [5, 3, 1], "mask_token_id": 95}, (6, 4, 2)),
        ("dflash", "dflash_config", ("target_layer_ids",), {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ("dflash", "", (), {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, (2, 4, 6)),
        ("dflash_speculators", "", (), {"aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ("dflash_speculators", "", (), {"target_layer_ids": [0, 2, 4]}, (2, 4, 6)),
    ],
)
def test_layer_ids_have_the_meaning_of_their_key_and_layout(
    tmp_path: Path, name: str, section: str, drop: tuple[str, ...], config: Any, states: tuple[int, ...]
) -> None:
    assert loaded(name, altered(tmp_path, name, drop=drop, section=section, **config)).config.needs.layers == states


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [(36, 5, [1, 9, 17, 25, 33]), (8, 3, [1, 3, 5]), (36, 1, [18]), (28, 5, [1, 7, 13, 19, 25])],
)
def test_default_layer_ids_are_spread_evenly(layers: int, count: int, ids: list[int]) -> None:
    assert default_outputs(layers, count) == ids


@pytest.mark.parametrize(
    ("nested", "top", "mask"),
    [
        ({"mask_token_id": 5}, {"mask_token_id": 6}, 5),
        ({}, {"mask_token_id": 6, "dspark_noise_token_id": 7}, 6),
        ({}, {"dspark_noise_token_id": 7, "pard_token": 8}, 7),
        ({}, {"pard_token": 8, "ptd_token_id": 9}, 8),
        ({}, {"ptd_token_id": 9}, 9),
    ],
)
def test_the_mask_token_is_looked_for_in_order(tmp_path: Path, nested: Any, top: Any, mask: int) -> None:
    head = loaded("dflash", altered(tmp_path, "dflash", dflash_config=nested, **top))
    assert head.config.mask_token == mask
    assert off_by(logits(head), DFLASH["logits"]) > SHOWS


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_mask_may_have_an_embedding_of_its_own(tmp_path: Path, as_dict: bool) -> None:
    row = target_weights()["model.embed_tokens.weight"][95].clone()
    folder = altered(tmp_path, "dflash", mask_token_id=3, dflash_config={"target_layer_ids": [1, 3, 5]})
    torch.save({"embedding": row, "mask_token_id": 3} if as_dict else row.unsqueeze(0), folder / MASK_FILE)
    assert off_by(logits(loaded("dflash", folder)), DFLASH["logits"]) < TOLERANCE
    torch.save(torch.zeros(5), folder / MASK_FILE)
    with pytest.raises(ModelError, match=r"mask_embedding\.pt holds no mask embedding of 32 elements"):
        loaded("dflash", folder)


MASK_ID = {"mask_token_id": 96, "dflash_config": {"target_layer_ids": [1, 3, 5]}}


def test_an_added_mask_token_needs_its_embedding(tmp_path: Path) -> None:
    """Its id is beyond the target's table."""
    folder = altered(tmp_path, "dflash", **MASK_ID)
    with pytest.raises(ModelError, match=rf"is 96, expected .* below 96 unless {MASK_FILE} has its embedding; correct"):
        loaded("dflash", folder)
    row = target_weights()["model.embed_tokens.weight"][95].clone()
    torch.save({"embedding": row, "mask_token_id": 96}, folder / MASK_FILE)
    assert off_by(logits(loaded("dflash", folder)), DFLASH["logits"]) < TOLERANCE


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"embedding": torch.zeros(32), "mask_token_id": 7}, "embedding of mask token 7, but .* mask token 96; fetch"),
        ({"mask_embedding": torch.zeros(32)}, "holds no mask embedding of 32 elements"),
        ([torch.zeros(32)], "holds no mask embedding of 32 elements"),
    ],
    ids=["another id", "another key", "list"],
)
def test_an_unsuitable_mask_file_is_refused(tmp_path: Path, content: Any, named: str) -> None:
    folder = altered(tmp_path, "dflash", **MASK_ID)
    torch.save(content, folder / MASK_FILE)
    with pytest.raises(ModelError, match=named):
        loaded("dflash", folder)
    (folder / MASK_FILE).write_bytes(b"no pickle")
    with pytest.raises(ModelError, match=r"cannot be read as tensors alone: .*; fetch it again"):
        loaded("dflash", folder)


def test_null_in_a_section_does_not_hide_the_value_outside(tmp_path: Path) -> None:
    nested = {"target_layer_ids": [1, 3, 5], "mask_token_id": None, "block_size": None}
    config = loaded("dflash", altered(tmp_path, "dflash", dflash_config=nested, mask_token_id=95)).config
    assert (config.mask_token, config.block_size) == (95, 5)


def test_the_block_size_is_read_from_either_key(tmp_path: Path) -> None:
    assert loaded("dflash").config.block_size == 5
    nested = {"mask_token_id": 95, "block_size": 3}
    assert loaded("dflash", altered(tmp_path, "dflash", dflash_config=nested)).config.block_size == 3
    assert loaded("dflash", altered(tmp_path, "dflash", drop=("block_size",))).config.block_size == 16


def test_the_length_in_speculators_section_determines_the_rope(tmp_path: Path) -> None:
    """Without an original length, yarn starts from the maximum length."""
    known = case("dflash_speculators")
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}

    def found(**config: Any) -> Tensor:
        folder = altered(tmp_path, "dflash_speculators", section="transformer_layer_config", **config)
        return logits(loaded("dflash_speculators", folder), known)

    explicit = found(rope_parameters=yarn | {"original_max_position_embeddings": 64})
    assert torch.equal(found(rope_parameters=yarn, max_position_embeddings=64), explicit)
    assert off_by(found(rope_parameters=yarn), explicit) > TOLERANCE


def test_scales_and_caps_are_applied(tmp_path: Path) -> None:
    """Norms partly cancel the embedding's scale; the logit scale and cap act directly."""
    head = loaded("dflash", altered(tmp_path, "dflash", output_multiplier=2.0, final_logit_softcapping=3.0))
    assert off_by(logits(head), 3 * torch.tanh(2 * DFLASH["logits"] / 3)) < TOLERANCE
    head = loaded("dflash", altered(tmp_path, "dflash", input_embedding_scale=2.0))
    scaled = logits(head)
    assert off_by(scaled, DFLASH["logits"]) > SHOWS
    doubled = 2 * target_weights()["model.embed_tokens.weight"]
    own = altered(tmp_path, "dflash", lambda tensors: tensors | {"embed_tokens.weight": doubled})
    assert off_by(logits(loaded("dflash", own)), scaled) < TOLERANCE, "a head's own embedding goes before the target's"


def test_a_head_s_own_lm_head_goes_before_the_target_s(tmp_path: Path) -> None:
    weight = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    head = loaded("dflash", altered(tmp_path, "dflash", lambda tensors: tensors | {"lm_head.weight": weight}))
    assert off_by(logits(head), DFLASH["block_hidden"][1:] @ weight.T) < TOLERANCE


def test_a_head_describes_how_it_was_understood(tmp_path: Path) -> None:
    lines = loaded("dflash", altered(tmp_path, "dflash", **SLIDING)).config.describe()
    assert lines[1] == "reads the target's states [2, 4, 6] (k: after k layers), 96 elements"
    assert lines[2] == "blocks of 4 tokens, mask token 95, RoPE base 1e+06, default"
    assert lines[3] == "layers attend: causal over 6, bidirectional"


# ---------------------------------------------------------------- refusals


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}
BY_LAYER_TYPE = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}


def nested(**config: Any) -> dict[str, Any]:
    return {"dflash_config": NESTED | config}


def mapped(ids: Tensor) -> Change:
    return lambda tensors: truncated(tensors) | {"token_map": ids}


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("medusa", QUANTIZED, "is a quantized draft head, which is not supported; use the unquantized head"),
        ("mlp_speculator", QUANTIZED, "is a quantized draft head"),
        ("mlp_speculator", {"n_predict": 4}, "n_predict 4 and 3 embeddings"),
        ("mlp_speculator", {"n_predict": 0}, "n_predict 0 and 3 embeddings"),
        ("dflash", {"hidden_size": 16}, "made for a target with 96 tokens and a hidden size of 16, but .* 96 and 32"),
        ("dflash", {"vocab_size": 100}, "made for a target with 100 tokens"),
        ("dflash", {"sample_from_anchor": True}, "sample_from_anchor .* is True, which is not supported"),
        ("dflash", {"attention_sink_bias": True}, "attention_sink_bias .* not supported"),
        ("dflash", {"is_neox_style": False}, "is_neox_style .* not supported"),
        ("dflash", nested(projector_type="dspark"), "projector_type .* not supported"),
        ("dflash", {"dflash_config": {}}, "mask_token_id .* is None, expected the mask token's id, below 96"),
        ("dflash", nested(mask_token_id=96), "mask_token_id .* is 96, expected"),
        ("dflash", nested(target_layer_ids=[1, 3]), r"states \[2, 4\], .* expected 3 of these"),
        ("dflash", nested(target_layer_ids=[1, 3, 8]), r"states \[2, 4, 9\].* target states 0 to 8"),
        ("dflash", {"block_size": 1}, "block_size .* is 1, expected at least 2"),
        ("dflash", {"layer_types": ["full_attention"]}, "layer_types .* each of 2 layers"),
        ("dflash", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("dflash", SLIDING | BY_LAYER_TYPE, "by layer type .* full_attention, sliding_attention and share one RoPE"),
        ("dflash", {"use_swa": True}, "use_swa .* but layer_types contains no sliding"),
        ("dflash", {"draft_vocab_size": 48}, "draft_vocab_size .* less only with the tensors d2t and lm_head"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, name: str, config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(name, altered(tmp_path, name, **config))


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("medusa", without("2."), r"Medusa heads \[0, 1, 3, 4\], expected 0, 1, ... without a gap"),
        ("medusa", without(""), "holds no tensors"),
        ("medusa", lambda _: {"fc.weight": torch.zeros(2)}, r"Medusa heads \[\], expected"),
        (
            "medusa",
            lambda tensors: {key: tensor[..., :16] for key, tensor in tensors.items()},
            "states of 16 elements, but the target's have 32",
        ),
        ("medusa", without("3.0"), r"no tensor 3\.0\.linear\.weight"),
        ("medusa", mapped(MAP[:3]), "token_map .* has 3 tokens, expected 4"),
        ("medusa", mapped(MAP + 10), "expected distinct ids below 96"),
        ("medusa", added("1.1.weight", 90, 32), r"1\.1\.weight .* \(90, 32\), expected"),
        ("medusa", added("0.0.linear.weight_scale", 1), r"no supported Medusa head uses: 0\.0\.linear\.weight_scale"),
        ("medusa", added("gate.weight", 3), r"uses: gate\.weight"),
        ("mlp_speculator", added("speculator.emb.0.weight_scale", 1), r"no supported MLPSpeculator head .*: emb\.0"),
        ("mlp_speculator", lambda _: {"fc.weight": torch.zeros(2)}, "holds no MLPSpeculator"),
        ("mlp_speculator", added("speculator.proj.0.weight", 24, 16), "states of 16 elements.* target's have 32"),
        ("mlp_speculator", added("speculator.ln.1.bias", 23), r"ln\.1\.bias .* shape \(23,\), expected \(24,\)"),
        ("mlp_speculator", tied_once, "n_predict 3 and 1 embeddings"),
        (
            "mlp_speculator",
            lambda tensors: {key: torch.cat([t, t]) if "emb" in key else t for key, t in tensors.items()},
            "192 tokens, expected at most 96",
        ),
        (
            "mlp_speculator",
            lambda tensors: {key: t[:90] if len(t) == 96 else t for key, t in tensors.items()},
            "90 tokens, but the target's ids go up to 95",
        ),
        ("dflash_speculators", without("d2t"), "draft_vocab_size"),
        ("dflash_speculators", lambda t: t | {"d2t": t["d2t"] + 60}, "expected distinct ids below 96"),
        ("dflash", without("layers.1.self_attn.q_norm"), r"no tensor layers\.1\.self_attn\.q_norm\.weight"),
        ("dflash", without("fc"), r"no tensor fc\.weight"),
        ("dflash", added("markov_head.markov_w1.weight", 2), "no supported DFlash head .*: markov_head"),
        ("dflash", added("layers.0.attention_conv.base_kernel", 2), "attention_conv"),
        ("dflash", added("norm.weight", 31), r"norm\.weight .* \(31,\), expected \(32,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str, change: Change, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(name, altered(tmp_path, name, change))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("medusa", "2.0.linear.bias"),
        ("medusa", "1.1.weight"),
        ("mlp_speculator", "speculator.emb.2.weight"),
        ("dflash", "fc.weight"),
        ("dflash_speculators", "lm_head.weight"),
    ],
)
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str, tensor: str, value: float) -> None:
    def change(tensors: Tensors) -> Tensors:
        return tensors | {tensor: torch.full_like(tensors[tensor], value)}

    with pytest.raises(
        ModelError, match=rf"NaN or infinite weights, .* {tensor.removeprefix('speculator.')} .*; fetch"
    ):
        loaded(name, altered(tmp_path, name, change))


def test_heads_that_predict_nothing_of_the_target_s_are_refused() -> None:
    with pytest.raises(ModelError, match="predicts none of the target's tokens"):
        loaded("medusa", proposable={100})
