"""Tests the configuration of EAGLE heads: refusals with reasons, layer ids, and overriding options."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.drafters.heads.eagle.config import (
    EagleConfig,
    EagleOverrides,
    LayerIdMeaning,
    OutputNorm,
    canonical,
    overrides_of,
    resolve,
    states_read,
)
from actors.drafters.heads.files import head_folder, read_head
from actors.drafters.heads.rope import target_shape
from actors.drafters.registry import capture_spec, create_method
from cluster.config import DraftPool, validated
from cluster.config_sections import EagleOptions
from cluster.errors import ConfigError, ModelError
from tests.unit.actors.drafters.drafting import a_setup
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    added,
    altered,
    case,
    checkpoint,
    loaded,
    off_by,
    without,
)

KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS = 36


# ---------------------------------------------------------------- layer ids


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({}, (2, 18, 33)),
        ({KEY: [2, 18, 33]}, (2, 18, 33)),
        ({KEY: [1, 17, 32]}, (1, 17, 32)),
        ({KEY: [33, 2, 18]}, (2, 18, 33)),
        ({"eagle_config": {KEY: [1, 17, 32]}}, (2, 18, 33)),
        ({"eagle_config": {KEY: [0, 10, 30]}}, (1, 11, 31)),
        ({"eagle_config": {KEY: [2, 18, 33]}}, (2, 18, 33)),
        ({KEY: [3, 4, 5], "eagle_config": {KEY: [1, 17, 32]}}, (3, 4, 5)),
        ({KEY: None, "eagle_config": {KEY: None, "use_aux_hidden_state": True}}, (2, 18, 33)),
        ({"target_layer_ids": [1, 17, 32]}, (2, 18, 33)),
        ({"eagle_config": {"layer_ids": [1, 17, 32]}}, (1, 17, 32)),
    ],
)
def test_layer_id_meaning_follows_the_key(config: dict[str, Any], states: tuple[int, ...]) -> None:
    assert states_read(config, LAYERS, 3) == states


@pytest.mark.parametrize(
    ("meaning", "states"), [(LayerIdMeaning.STATE, (1, 17, 32)), (LayerIdMeaning.OUTPUT, (2, 18, 33))]
)
def test_the_meaning_of_ids_can_be_overridden(meaning: LayerIdMeaning, states: tuple[int, ...]) -> None:
    for config in ({KEY: [1, 17, 32]}, {"eagle_config": {KEY: [1, 17, 32]}}):
        assert states_read(config, LAYERS, 3, meaning) == states
    assert states_read({}, LAYERS, 3, meaning) == (2, 18, 33), "the default is of states in either case"


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        ({KEY: [2, 18]}, LAYERS, r"reads 3 states side by side, but layer ids \[2, 18\] lists 2"),
        ({KEY: [2, 18, 36]}, LAYERS, r"states \[2, 18, 36\]; .* use distinct indices from 0 to 35"),
        ({"eagle_config": {KEY: [1, 17, 35]}}, LAYERS, r"states \[2, 18, 36\]"),
        ({KEY: [2, 2, 18]}, LAYERS, "use distinct indices"),
        ({KEY: [-1, 2, 18]}, LAYERS, "use distinct indices"),
        ({KEY: "2,18,33"}, LAYERS, "expected a list of whole numbers; correct its config.json"),
        (
            {"aux_hidden_state_layer_ids": [1, 2, 3]},
            LAYERS,
            r"\[1, 2, 3\] as aux_hidden_state_layer_ids, .*; set draft",
        ),
        ({"eagle_config": {"tap_layer_ids": [1, 2, 3]}}, LAYERS, "as tap_layer_ids"),
        ({}, 4, r"is not in its configuration, and the default of the EAGLE-3 head selects states \[2, 2, 1\]"),
    ],
)
def test_nonexistent_states_are_refused(config: dict[str, Any], layers: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        states_read(config, layers, 3)


def test_state_layers_can_be_configured_directly() -> None:
    given = EagleOverrides(states=(0, 1, 7))
    assert loaded(checkpoint("eagle3"), given).config.needs.layers == (0, 1, 7)
    for states in ((0, 1), (0, 1, 8)):
        with pytest.raises(ModelError, match="the option for states"):
            loaded(checkpoint("eagle3"), EagleOverrides(states=states))


# ---------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "vocabulary": ("eagle3", {"vocab_size": 128}, "made for a vocabulary of 128, but the target has 96"),
    "target_hidden_size": ("eagle3", {"target_hidden_size": 64}, "a hidden size of 64, but the target has 32"),
    "fc": ("eagle3", {"change": added("fc.weight", 32, 80)}, "80 inputs, not a multiple of .* 32"),
    "one state too many": ("eagle3", {"change": added("fc.weight", 32, 128)}, "reads 4 states side by side, but"),
    "hidden size of EAGLE-1": (
        "eagle1",
        {"hidden_size": 16, "change": added("layers.0.self_attn.q_proj.weight", 32, 16)},
        "final states of 16 elements, but the target's hidden size is 32",
    ),
    "no head": (
        "eagle3",
        {"change": without("midlayer.self_attn.q_proj.weight")},
        "holds no tensor layers.0.self_attn",
    ),
    "another method's": (
        "eagle1",
        {"change": lambda _: {"0.0.linear.weight": torch.ones(32, 32)}},
        r"is no EAGLE head: it has the decoder layers \[\]",
    ),
    "inputs of neither kind": (
        "eagle3",
        {"change": added("midlayer.self_attn.q_proj.weight", 32, 40)},
        r"has 40 inputs, expected 32 and a tensor fc.weight \(EAGLE-1/2\) or 64 \(EAGLE-3\)",
    ),
    "a gap": (
        "eagle1",
        {"change": added("layers.2.self_attn.q_proj.weight", 32, 32)},
        r"decoder layers \[0, 2\], expected 0",
    ),
    "layer count": ("eagle1", {"num_hidden_layers": 2}, "2 decoder layers by its config.json, but tensors of 1"),
    "no size": ("eagle1", {"drop": ("hidden_size",)}, "hidden_size in the config.json of .* is None"),
    "shape": ("eagle1", {"intermediate_size": 60}, r"gate_proj.weight in .* has shape \(64, 32\), expected \(60, 32\)"),
    "head_dim": ("eagle1", {"head_dim": 16}, r"q_proj.weight in .* has shape \(32, 32\), expected \(64, 32\)"),
    "missing tensor": ("eagle1", {"change": without("layers.0.mlp.up_proj.weight")}, "no tensor layers.0.mlp.up_proj"),
    "no norm of the states": (
        "eagle3",
        {"change": without("midlayer.hidden_norm")},
        r"no tensor layers\.0\.hidden_norm\.weight",
    ),
    "no last norm": ("eagle3", {"change": without("norm.weight")}, r"no tensor norm\.weight"),
    "further tensor": ("eagle3", {"change": added("midlayer.self_attn.sinks", 4)}, "supported EAGLE head .*: .*sinks"),
    "NaN": (
        "eagle3",
        {"change": lambda t: t | {"fc.weight": torch.full_like(t["fc.weight"], torch.nan)}},
        r"NaN or infinite weights, read as float32: fc\.weight \(1\); fetch",
    ),
    "d2t": ("eagle3", {"change": without("d2t")}, "proposes 48 of 96 tokens, but has no tensor d2t"),
    "another t2d": (
        "eagle3",
        {"change": lambda t: t | {"d2t": torch.zeros_like(t["d2t"])}},
        "d2t and t2d in .* select different tokens; fetch or convert the head again",
    ),
    "no head's head": ("eagle3", {"change": without("lm_head.weight")}, "has no lm_head.weight"),
    "draft_vocab_size": ("eagle3", {"draft_vocab_size": 97}, "is 97, expected 1 to 96"),
    "norm before fc that is not there": ("eagle3", {"norm_before_fc": True}, "no tensor input_norm.weight, but"),
    "norm before fc that is not configured": (
        "eagle3_speculators",
        {"change": added("input_norm.weight", 96)},
        "a tensor input_norm.weight, but config.json disagrees",
    ),
    "both norms": (
        "eagle3",
        {"change": lambda t: t | added("input_norm.weight", 96)({}) | added("fc_norm.0.weight", 32)({})},
        "both input_norm and fc_norm",
    ),
    "a mask token without its state": ("eagle3", {"mask_token_id": 3}, "mask token 3, but no tensor mask_hidden"),
    "a state without its mask token": (
        "eagle3",
        {"change": added("mask_hidden", 1, 96)},
        "mask token of .* is None by",
    ),
    "a mask token beyond": (
        "eagle3",
        {"change": added("mask_hidden", 1, 96), "pard_token": 96},
        "is 96 by .*, expected an id from 0 to 95",
    ),
    "a mask's state": (
        "eagle3",
        {"change": added("mask_hidden", 1, 32), "pard_token": 9},
        "mask_hidden in .* has 32 elements, expected 96",
    ),
    "attention_bias": ("eagle3", {"attention_bias": True}, "attention_bias, but no tensor"),
    "fc bias": ("eagle1", {"bias": True}, "bias, but no tensor fc.bias"),
    "activation": ("eagle3", {"hidden_act": "gelu"}, "the activation gelu, but only silu"),
    "sliding window": ("eagle3", {"layer_types": ["sliding_attention"]}, "layers of sliding_attention"),
    "quantized": ("eagle3", {"quantization_config": {"quant_method": "fp8"}}, "is a quantized draft head"),
    "rope": (
        "eagle3",
        {"rope_scaling": {"rope_type": "spiral"}},
        "of kind 'spiral', expected one of .*; use another head",
    ),
    "rope base": ("eagle3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "without rope_theta; add the"),
    "rope types": (
        "eagle3",
        {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type 'default' in rope_parameters, but 'linear' in rope_scaling; remove the wrong section",
    ),
    "rope factors": (
        "eagle3",
        {
            "rope_parameters": {"rope_theta": 5.0, "rope_type": "linear", "factor": 4.0},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "factor 4.0 in rope_parameters, but 2.0",
    ),
    "rope bases": (
        "eagle3",
        {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "default", "rope_theta": 6.0}},
        "rope_theta 5.0 in rope_parameters, but 6.0",
    ),
    "rope of another layer type": (
        "eagle3",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}, "chunked_attention": {"rope_theta": 6.0}}},
        r"by layer type \(sliding_attention, chunked_attention\)",
    ),
    "rotated in part": ("eagle3", {"partial_rotary_factor": 0.5}, "partial rotary positions"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_misfitting_weights_are_refused(tmp_path: Path, refused: str) -> None:
    name, changes, message = REFUSED[refused]
    with pytest.raises(ModelError, match=message):
        loaded(altered(tmp_path, name, **changes))


def test_a_missing_last_norm_can_be_allowed(tmp_path: Path) -> None:
    folder = altered(tmp_path, "eagle3", without("norm.weight"))
    assert loaded(folder, EagleOverrides(output_norm=OutputNorm.NOTHING)).config.output_norm is OutputNorm.NOTHING


# ---------------------------------------------------------------- options


def a_draft(folder: Any = None, **options: Any) -> DraftPool:
    return DraftPool(method="eagle", model=str(folder or checkpoint("eagle3")), eagle=EagleOptions(**options))


def layers_of(draft: DraftPool) -> tuple[int, ...]:
    """Returns the layers that the target captures."""
    spec = capture_spec(draft, TARGET, "float32")
    assert spec is not None
    return spec.layers


def config_of(draft: DraftPool, caplog: pytest.LogCaptureFixture) -> EagleConfig:
    """Returns the configuration that the drafter resolves and logs."""
    files = canonical(read_head(head_folder(draft)))
    config = resolve(files, target_shape(TARGET), overrides_of(draft.eagle))
    with caplog.at_level(logging.INFO):
        create_method(draft, a_setup(draft))
    assert "\n".join(config.describe()) in caplog.text
    return config


def test_defaults_override_nothing() -> None:
    assert overrides_of(EagleOptions()) == EagleOverrides()


@pytest.mark.parametrize(
    ("ids", "options", "layers"),
    [
        (None, {"states": (0, 1, 7)}, (0, 1, 7)),
        ([1, 4, 6], {"layer_ids": "state"}, (1, 4, 6)),
        ([1, 4, 6], {"layer_ids": "output"}, (2, 5, 7)),
        ([1, 4, 6], {}, (1, 4, 6)),
    ],
)
def test_states_and_layer_ids_select_the_states_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: Any, options: Any, layers: tuple[int, ...]
) -> None:
    draft = a_draft(altered(tmp_path, "eagle3", **{KEY: ids}) if ids else None, **options)
    assert layers_of(draft) == config_of(draft, caplog).needs.layers == layers


@pytest.mark.parametrize(
    ("ids", "options", "warns"),
    [(None, {}, True), ([1, 4, 6], {}, False), (None, {"states": (2, 4, 5)}, False)],
    ids=["default", "configured", "overridden"],
)
def test_states_that_are_a_guess_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: Any, options: Any, warns: bool
) -> None:
    draft = a_draft(altered(tmp_path, "eagle3", **{KEY: ids}) if ids else None, **options)
    config = config_of(draft, caplog)
    assert config.guesses_states is warns
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("states [2, 4, 5]: the states are a default" in text for text in warnings) is warns


def test_the_last_norm_and_the_positions_are_overridden(caplog: pytest.LogCaptureFixture) -> None:
    for norm in OutputNorm:
        assert config_of(a_draft(output_norm=norm.name.lower()), caplog).output_norm is norm
    assert config_of(a_draft(max_positions=4096), caplog).max_positions == 4096


def test_the_target_projects_the_selected_states() -> None:
    """The target loads the projection in its own process, with the same options."""
    raw = case("eagle3")["features"]
    spec = capture_spec(a_draft(states=(0, 1, 7)), TARGET, "float32")
    usual = capture_spec(a_draft(), TARGET, "float32")
    assert spec is not None
    assert usual is not None
    one = spec.projection_on(CPU)
    other = usual.projection_on(CPU)
    assert one is not None
    assert other is not None
    with torch.inference_mode():
        assert off_by(one(raw), other(raw)) == 0.0


def test_every_option_becomes_an_override() -> None:
    options = EagleOptions(states=(1, 2), layer_ids="output", output_norm="both", max_positions=9)
    assert overrides_of(options) == EagleOverrides((1, 2), LayerIdMeaning.OUTPUT, OutputNorm.BOTH, 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"states": [3, 1]}, "eagle.states"),
        ({"states": []}, "eagle.states"),
        ({"states": [-1, 2]}, "eagle.states"),
        ({"layer_ids": "input"}, "eagle.layer_ids"),
        ({"output_norm": "some"}, "eagle.output_norm"),
        ({"max_positions": 0}, "eagle.max_positions"),
        ({"norm_output": True}, "eagle.norm_output"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validated({"model": {"target": "t"}, "draft": {"method": "eagle", "model": "m", "eagle": options}})
