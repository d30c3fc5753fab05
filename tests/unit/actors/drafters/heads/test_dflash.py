"""DFlash heads of both published layouts against the reference, and each option that published heads vary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from actors.drafters.heads.dflash.config import DFlashLayerKind, default_outputs
from actors.drafters.heads.dflash.drafting import DFlashContext, DFlashDecoder, load_dflash
from actors.drafters.heads.dflash.weights import MASK_FILE
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    TOLERANCE,
    Case,
    Change,
    altered,
    case,
    checkpoint,
    off_by,
)

LAYOUTS = ("dflash", "dflash_speculators")
KNOWN = case("dflash")
PROMPT = 12
SHOWS = 0.01  # what a wrong convention moves logits by, at least
Tensors = dict[str, Tensor]


def loaded(folder: Path, proposable: Sequence[int] = range(96)) -> DFlashDecoder:
    return load_dflash(folder, TARGET, torch.float32, CPU, proposable)


@torch.inference_mode()
def hidden(head: DFlashDecoder, known: Case = KNOWN, context: DFlashContext | None = None) -> Tensor:
    """Returns the hidden states of the first block, (block, hidden)."""
    context = context or DFlashContext()
    context.put(0, head.project(known["features"]))
    return head.hidden([context], [int(known["anchor"])], [PROMPT])[0]


@torch.inference_mode()
def logits(head: DFlashDecoder, known: Case = KNOWN) -> Tensor:
    return head.logits(hidden(head, known)[1:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_is_the_reference_s(name: str) -> None:
    known = case(name)
    head = loaded(checkpoint(name))
    assert off_by(hidden(head, known), known["block_hidden"]) < TOLERANCE
    assert off_by(logits(head, known), known["logits"]) < TOLERANCE
    assert torch.equal(head.token_ids[logits(head, known).argmax(dim=-1)], known["draft_tokens"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_states_that_are_read_are_the_ones_that_the_reference_taps(name: str) -> None:
    needs = loaded(checkpoint(name)).config.needs
    target = case("target")
    states = torch.cat([target[f"hs_{k}"] for k in needs.layers], dim=-1)
    assert needs.width == states.shape[-1]
    assert off_by(states, case(name)["features"]) < TOLERANCE


@torch.inference_mode()
def test_a_second_block_comes_after_the_states_of_what_was_accepted() -> None:
    """Keys and values of the first block are gone, those of its context are kept."""
    head = loaded(checkpoint("dflash"))
    context = DFlashContext()
    hidden(head, context=context)
    context.put(PROMPT, head.project(KNOWN["step2_features"]))
    found = head.hidden([context], [int(KNOWN["step2_anchor"])], [PROMPT + 3])[0]
    assert off_by(found, KNOWN["step2_block_hidden"]) < TOLERANCE
    assert off_by(head.logits(found[1:]), KNOWN["step2_logits"]) < TOLERANCE


@torch.inference_mode()
def test_sessions_of_several_lengths_are_computed_together() -> None:
    head = loaded(checkpoint("dflash"))
    contexts = [DFlashContext() for _ in range(3)]
    for context, count in zip(contexts, (PROMPT, 5, PROMPT), strict=True):
        context.put(0, head.project(KNOWN["features"][:count]))
    head.hidden(contexts[2:], [3], [7])
    anchors = [int(KNOWN["anchor"]), 8, int(KNOWN["anchor"])]
    found = head.hidden(contexts, anchors, [PROMPT, 5, PROMPT])
    assert off_by(found[0], KNOWN["block_hidden"]) < TOLERANCE
    assert off_by(found[2], KNOWN["block_hidden"]) < TOLERANCE
    alone = DFlashContext()
    alone.put(0, head.project(KNOWN["features"][:5]))
    assert off_by(found[1], head.hidden([alone], [8], [5])[0]) < TOLERANCE


# ---------------------------------------------------------------- kinds of attention


def restated(tensors: Tensors, kinds: Sequence[DFlashLayerKind]) -> Tensor:
    """The forward written out again, one query and head at a time, (block, hidden)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * tensors[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        angles = position / 1e6 ** (torch.arange(8) / 8)
        first, second = x.split(8)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    embedding = target_weights()["model.embed_tokens.weight"]
    states = norm(KNOWN["features"] @ tensors["fc.weight"].T, "hidden_norm")
    x = embedding[[int(KNOWN["anchor"]), 95, 95, 95, 95]]
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


def test_the_restatement_is_the_reference_s_where_all_is_full() -> None:
    assert off_by(restated(stored(checkpoint("dflash")), (FULL, FULL)), KNOWN["block_hidden"]) < TOLERANCE


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
def test_which_layers_are_causal_and_how_far_they_see(tmp_path: Path, config: Any, kinds: Any) -> None:
    folder = altered(tmp_path, "dflash", **config)
    head = loaded(folder)
    assert head.config.layers == kinds
    assert off_by(hidden(head), restated(stored(folder), kinds)) < TOLERANCE
    if kinds != (FULL, FULL):
        assert off_by(hidden(head), KNOWN["block_hidden"]) > SHOWS


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
def test_layer_ids_mean_what_those_who_write_them_mean(
    tmp_path: Path, name: str, section: str, drop: tuple[str, ...], config: Any, states: tuple[int, ...]
) -> None:
    assert loaded(altered(tmp_path, name, drop=drop, section=section, **config)).config.needs.layers == states


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [(36, 5, [1, 9, 17, 25, 33]), (8, 3, [1, 3, 5]), (36, 1, [18]), (28, 5, [1, 7, 13, 19, 25])],
)
def test_ids_that_are_not_said_are_spread_evenly(layers: int, count: int, ids: list[int]) -> None:
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
    head = loaded(altered(tmp_path, "dflash", dflash_config=nested, **top))
    assert head.config.mask_token == mask
    assert off_by(logits(head), KNOWN["logits"]) > SHOWS


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_mask_may_have_an_embedding_of_its_own(tmp_path: Path, as_dict: bool) -> None:
    row = target_weights()["model.embed_tokens.weight"][95].clone()
    folder = altered(tmp_path, "dflash", mask_token_id=3, dflash_config={"target_layer_ids": [1, 3, 5]})
    torch.save({"embedding": row, "mask_token_id": 3} if as_dict else row.unsqueeze(0), folder / MASK_FILE)
    assert off_by(logits(loaded(folder)), KNOWN["logits"]) < TOLERANCE
    torch.save(torch.zeros(5), folder / MASK_FILE)
    with pytest.raises(ModelError, match=r"mask_embedding\.pt holds no tensor of 32 elements"):
        loaded(folder)


def test_the_block_s_size_stands_in_either_place(tmp_path: Path) -> None:
    assert loaded(checkpoint("dflash")).config.block_size == 5
    nested = {"mask_token_id": 95, "block_size": 3}
    assert loaded(altered(tmp_path, "dflash", dflash_config=nested)).config.block_size == 3
    assert loaded(altered(tmp_path, "dflash", drop=("block_size",))).config.block_size == 16


def test_scales_and_caps_are_applied(tmp_path: Path) -> None:
    """Norms undo a scale of the embedding in part; the scale of all logits and the cap are plain."""
    head = loaded(altered(tmp_path, "dflash", output_multiplier=2.0, final_logit_softcapping=3.0))
    assert off_by(logits(head), 3 * torch.tanh(2 * KNOWN["logits"] / 3)) < TOLERANCE
    head = loaded(altered(tmp_path, "dflash", input_embedding_scale=2.0))
    scaled = logits(head)
    assert off_by(scaled, KNOWN["logits"]) > SHOWS
    doubled = 2 * target_weights()["model.embed_tokens.weight"]
    own = altered(tmp_path, "dflash", lambda tensors: tensors | {"embed_tokens.weight": doubled})
    assert off_by(logits(loaded(own)), scaled) < TOLERANCE, "a head's own embedding goes before the target's"


def test_a_head_s_own_lm_head_goes_before_the_target_s(tmp_path: Path) -> None:
    weight = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    head = loaded(altered(tmp_path, "dflash", lambda tensors: tensors | {"lm_head.weight": weight}))
    assert off_by(logits(head), KNOWN["block_hidden"][1:] @ weight.T) < TOLERANCE


def with_other_names(tensors: Tensors) -> Tensors:
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    found = {}
    for name, tensor in tensors.items():
        other = next((alias + name[len(own) :] for own, alias in names.items() if name.startswith(own)), name)
        found[f"model.{other}"] = tensor
    return found


def test_other_names_of_the_same_tensors(tmp_path: Path) -> None:
    assert off_by(logits(loaded(altered(tmp_path, "dflash", with_other_names))), KNOWN["logits"]) < TOLERANCE


def test_projections_may_have_biases(tmp_path: Path) -> None:
    def biased(size: float) -> Change:
        sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 32}
        return lambda tensors: (
            tensors
            | {
                f"layers.{i}.self_attn.{name}.bias": torch.full((n,), size)
                for i in range(2)
                for name, n in sizes.items()
            }
        )

    assert off_by(logits(loaded(altered(tmp_path, "dflash", biased(0.0)))), KNOWN["logits"]) < TOLERANCE
    assert off_by(logits(loaded(altered(tmp_path, "dflash", biased(0.3)))), KNOWN["logits"]) > SHOWS


def test_only_proposable_tokens_are_predicted() -> None:
    known = case("dflash_speculators")
    every = loaded(checkpoint("dflash_speculators")).token_ids
    some = every[[3, 7, 40]].tolist()
    head = loaded(checkpoint("dflash_speculators"), proposable=some)
    assert head.token_ids.tolist() == some
    assert off_by(logits(head, known), known["logits"][:, [3, 7, 40]]) < TOLERANCE


def test_a_head_says_how_it_was_understood(tmp_path: Path) -> None:
    lines = loaded(altered(tmp_path, "dflash", **SLIDING)).config.describe()
    assert lines[1] == "reads the target's states [2, 4, 6] (k: after k layers), 96 elements"
    assert lines[2] == "blocks of 4 tokens, mask token 95, RoPE base 1e+06, default"
    assert lines[3] == "layers attend: causal over 6, bidirectional"


# ---------------------------------------------------------------- refusals


def without(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}


@pytest.mark.parametrize(
    ("name", "change", "config", "named"),
    [
        (
            "dflash",
            dict,
            {"hidden_size": 16},
            "made for a target with 96 tokens and a hidden size of 16, but .* 96 and 32",
        ),
        ("dflash", dict, {"vocab_size": 100}, "made for a target with 100 tokens"),
        ("dflash", dict, {"sample_from_anchor": True}, "sample_from_anchor .* is True, which is not supported"),
        ("dflash", dict, {"attention_sink_bias": True}, "attention_sink_bias .* not supported"),
        ("dflash", dict, {"is_neox_style": False}, "is_neox_style .* not supported"),
        ("dflash", dict, {"dflash_config": NESTED | {"projector_type": "dspark"}}, "projector_type .* not supported"),
        ("dflash", dict, {"dflash_config": {}}, "mask_token_id .* is None, expected the mask token's id, below 96"),
        ("dflash", dict, {"dflash_config": {"mask_token_id": 96}}, "mask_token_id .* is 96, expected"),
        (
            "dflash",
            dict,
            {"dflash_config": NESTED | {"target_layer_ids": [1, 3]}},
            r"states \[2, 4\], .* expected 3 of these",
        ),
        (
            "dflash",
            dict,
            {"dflash_config": NESTED | {"target_layer_ids": [1, 3, 8]}},
            r"states \[2, 4, 9\].* target states 0 to 8",
        ),
        ("dflash", dict, {"block_size": 1}, "block_size .* is 1, expected at least 2"),
        ("dflash", dict, {"layer_types": ["full_attention"]}, "layer_types .* each of 2 layers"),
        ("dflash", dict, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("dflash", dict, {"use_swa": True}, "use_swa .* but layer_types names no layer"),
        ("dflash", dict, {"draft_vocab_size": 48}, "draft_vocab_size .* less only with the tensors d2t and lm_head"),
        ("dflash_speculators", without("d2t"), {}, "draft_vocab_size"),
        ("dflash_speculators", lambda t: t | {"d2t": t["d2t"] + 60}, {}, "expected different ids below 96"),
        ("dflash", without("layers.1.self_attn.q_norm"), {}, r"no tensor layers\.1\.self_attn\.q_norm\.weight"),
        ("dflash", without("fc"), {}, r"no tensor fc\.weight"),
        (
            "dflash",
            lambda t: t | {"markov_head.markov_w1.weight": torch.zeros(2)},
            {},
            "no DFlash head .*: markov_head",
        ),
        ("dflash", lambda t: t | {"layers.0.attention_conv.base_kernel": torch.zeros(2)}, {}, "attention_conv"),
        ("dflash", lambda t: t | {"norm.weight": torch.zeros(31)}, {}, r"norm\.weight .* \(31,\), expected \(32,\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, name: str, change: Change, config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(altered(tmp_path, name, change, **config))
