"""Tests inspection of every published layout in `tests/data/heads`, and refusals equal to the loaders'."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from actors.drafters.heads.dflash.drafting import load_dflash
from actors.drafters.heads.eagle.config import canonical, overrides_of, resolve
from actors.drafters.heads.files import read_head, read_headers
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.drafters.heads.rope import target_shape
from cluster.config import validated
from cluster.config_sections import EagleOptions
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, altered, checkpoint, loaded
from tools.drafts.headers import (
    CAUSAL,
    LAYER_SKIP,
    DraftFacts,
    Mismatch,
    causal_facts,
    conventions_of,
    layout_of,
)
from tools.drafts.inspection import inspect_draft

VOCABULARY = 96
LOADERS: Mapping[str, Callable[..., object]] = {
    "dflash": load_dflash,
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
}
KNOWN: Mapping[str, dict[str, Any]] = {
    "eagle1": {
        "layout": "EAGLE-1/2 head, SafeAILab's layout",
        "method": "eagle",
        "layers": (8,),
        "is_final": True,
        "widths": (32, None),
        "proposes": 96,
        "whose": ("the head", "the target"),
        "rope": "RoPE base 500000, default",
        "positions": 2048,
    },
    "eagle3": {
        "layout": "EAGLE-3 head, SafeAILab's layout",
        "method": "eagle",
        "layers": (2, 4, 5),
        "is_final": False,
        "widths": (96, 32),
        "proposes": 48,
        "whose": ("the target", "the head"),
        "rope": "RoPE base 10000, default",
        "positions": 2048,
    },
    "eagle3_speculators": {
        "layout": "EAGLE-3 head, speculators' layout",
        "method": "eagle",
        "layers": (2, 4, 5),
        "is_final": False,
        "widths": (96, 32),
        "proposes": 48,
        "whose": ("the head", "the head"),
        "rope": "RoPE base 500000, default",
        "positions": 2048,
    },
    "medusa": {
        "layout": "Medusa heads, FasterDecoding's layout",
        "method": "medusa",
        "layers": (8,),
        "is_final": True,
        "widths": (32, None),
        "proposes": 96,
        "whose": ("none", "the head"),
        "rope": "",
        "positions": None,
    },
    "mlp_speculator": {
        "layout": "MLPSpeculator",
        "method": "mlp_speculator",
        "layers": (8,),
        "is_final": True,
        "widths": (32, None),
        "proposes": 96,
        "whose": ("the head", "the head"),
        "rope": "",
        "positions": None,
    },
    "dflash": {
        "layout": "DFlash head, z-lab's layout",
        "method": "dflash",
        "layers": (2, 4, 6),
        "is_final": False,
        "widths": (96, 32),
        "proposes": 96,
        "whose": ("the target", "the target"),
        "rope": "RoPE base 1e+06, default",
        "positions": 4096,
    },
    "dflash_speculators": {
        "layout": "DFlash head, speculators' layout",
        "method": "dflash",
        "layers": (2, 4, 6),
        "is_final": False,
        "widths": (96, 32),
        "proposes": 48,
        "whose": ("the target", "the head"),
        "rope": "RoPE base 1e+06, default",
        "positions": 2048,
    },
}
every_head = pytest.mark.parametrize("name", KNOWN)


def facts_as_dict(facts: DraftFacts) -> dict[str, Any]:
    """Returns facts in the format of `KNOWN`."""
    return {
        "layout": facts.layout.name,
        "method": facts.layout.method,
        "layers": facts.states.layers,
        "is_final": facts.states.is_final,
        "widths": (facts.states.width, facts.states.projected),
        "proposes": facts.proposes,
        "whose": (facts.embedding, facts.lm_head),
        "rope": facts.rope,
        "positions": facts.positions,
    }


def copied(folder: Path, name: str, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Writes a copy of a fixture with changed tensors and configuration keys."""
    said = json.loads((checkpoint(name) / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def loads(method: str, folder: Path) -> bool:
    try:
        if method == "eagle":
            loaded(folder, proposable=range(VOCABULARY))
        else:
            LOADERS[method](folder, TARGET, torch.float32, CPU, proposable=range(VOCABULARY))
    except ModelError:
        return False
    return True


# ---------------------------------------------------------------- facts


@every_head
def test_every_published_layout_is_recognized(name: str) -> None:
    found = inspect_draft(checkpoint(name), TARGET)
    assert (found.mismatches, facts_as_dict(found.facts)) == ((), KNOWN[name])


@every_head
def test_without_a_target_only_depth_dependent_facts_are_unknown(name: str) -> None:
    found = inspect_draft(checkpoint(name))
    is_stated = name in ("eagle3_speculators", "dflash", "dflash_speculators")
    assert facts_as_dict(found.facts) == KNOWN[name] | ({} if is_stated else {"layers": ()})
    assert found.fits


@every_head
def test_parameters_and_bytes_are_those_of_the_loaded_tensors(name: str) -> None:
    tensors = read_head(checkpoint(name)).tensors.values()
    size = inspect_draft(checkpoint(name)).facts.size
    assert size.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size.parameters == sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


@every_head
def test_weights_are_not_read(name: str) -> None:
    tensors = read_headers(checkpoint(name)).tensors
    whole = read_head(checkpoint(name)).tensors
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in whole.items()
    }
    assert {key for key, tensor in tensors.items() if tensor.device.type != "meta"} == tensors.keys() & {"d2t", "t2d"}
    for key in tensors.keys() & {"d2t", "t2d"}:
        assert torch.equal(tensors[key], whole[key])


@every_head
def test_the_suggested_configuration_is_valid(name: str) -> None:
    config = validated(yaml.safe_load(inspect_draft(checkpoint(name), TARGET).snippet))
    assert (config.draft.method, config.draft.model) == (KNOWN[name]["method"], str(checkpoint(name)))
    assert (config.model.target, config.model.max_context) == (str(TARGET), 256)


def test_state_bytes_are_those_of_one_row() -> None:
    states = inspect_draft(checkpoint("eagle3")).facts.states
    assert states.row_bytes == {
        "drafter": {"bfloat16": 2 * 96, "float8": 96 + 4},
        "target": {"bfloat16": 2 * 32, "float8": 32 + 4},
    }


def test_a_language_model_is_a_draft_model_or_layer_skip_of_itself() -> None:
    alone = inspect_draft(TARGET)
    assert (alone.facts.layout, alone.facts.shape["layers"], alone.facts.states) == (CAUSAL, 8, None)
    itself = inspect_draft(TARGET, TARGET)
    assert (itself.facts.layout, itself.fits) == (LAYER_SKIP, True)
    assert validated(yaml.safe_load(itself.snippet)).draft.layer_skip.ids == (0, 1)


@pytest.mark.parametrize(("name", "is_guess"), [("eagle3", True), ("eagle3_speculators", False), ("eagle1", False)])
def test_states_that_are_a_guess_are_marked(name: str, is_guess: bool) -> None:
    conventions = inspect_draft(checkpoint(name), TARGET).facts.conventions
    assert any("not in the head's configuration; set draft.eagle.states" in line for line in conventions) is is_guess


@pytest.mark.parametrize(
    ("rope", "shown"),
    [
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "RoPE by layer type"),
        ({"rope_type": "linear", "factor": 2.0}, "RoPE base 10000, linear, factor 2.0"),
    ],
)
def test_the_rope_of_a_language_model_is_shown(rope: dict[str, Any], shown: str) -> None:
    files = read_headers(TARGET)
    config = {key: value for key, value in files.config.items() if key != "rope_theta"}
    assert causal_facts(replace(files, config=config | {"rope_parameters": rope}), CAUSAL).rope == shown


def test_rope_scaling_of_a_language_model_replaces_rope_parameters() -> None:
    files = read_headers(TARGET)
    sections = {
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    shown = causal_facts(replace(files, config=dict(files.config) | sections), CAUSAL).rope
    assert shown == "RoPE base 1e+06, linear, factor 4.0"


@pytest.mark.parametrize(
    "options",
    [{"output_norm": "both"}, {"states": [0, 3, 7]}, {"layer_ids": "state"}, {"max_positions": 100}],
    ids=lambda options: next(iter(options)),
)
def test_options_apply_to_the_shown_head(options: dict[str, Any], tmp_path: Path) -> None:
    """The head's configuration lists layers, so an option can override the meaning of layer ids."""
    tensors = read_head(checkpoint("eagle3")).tensors
    folder = copied(tmp_path, "eagle3", tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    found = inspect_draft(folder, TARGET, {"eagle": options})
    usual = inspect_draft(folder, TARGET)
    overrides = overrides_of(EagleOptions.model_validate(options))
    config = resolve(canonical(read_head(folder)), target_shape(TARGET), overrides)
    assert (found.facts.states.layers, found.facts.positions) == (config.needs.layers, config.max_positions)
    assert found.facts.conventions == conventions_of(config)
    assert replace(found.facts, size=usual.facts.size) != usual.facts
    assert validated(yaml.safe_load(found.snippet)).draft.eagle == EagleOptions.model_validate(options)


def test_unsuitable_options_are_misfits(tmp_path: Path) -> None:
    (misfit,) = inspect_draft(checkpoint("eagle3"), TARGET, {"eagle": {"states": [1, 2]}}).mismatches
    assert "the option for states" in str(misfit)


def test_the_targets_hidden_size_follows_from_the_number_of_states(tmp_path: Path) -> None:
    """The head is narrower than its target, so only `fc` reveals the width of the states."""
    tensors = dict(read_head(checkpoint("eagle3")).tensors) | {"fc.weight": torch.ones(32, 4 * 12)}
    folder = copied(tmp_path, "eagle3", tensors)
    states = inspect_draft(folder, None, {"eagle": {"states": [1, 2, 3, 4]}}).facts.states
    assert (states.hidden, states.layers) == (12, (1, 2, 3, 4))


def test_layers_beyond_the_targets_depth_are_a_misfit() -> None:
    found = inspect_draft(TARGET, TARGET, {"layer_skip": {"layers": [0, 7]}})
    assert (found.fits, validated(yaml.safe_load(found.snippet)).draft.layer_skip.ids) == (True, (0, 7))
    (misfit,) = inspect_draft(TARGET, TARGET, {"layer_skip": {"layers": [0, 8]}}).mismatches
    assert "has the layers 0 to 7, but layers 8 are asked for" in str(misfit)


# ---------------------------------------------------------------- layouts without a fixture


@pytest.mark.parametrize(
    ("name", "changed", "layout"),
    [
        ("eagle3", {"mask_hidden": torch.zeros(1, 1, 96)}, "P-EAGLE head, SafeAILab's layout"),
        ("eagle1", {"embed_layernorm.weight": torch.ones(32)}, "EAGLE-1/2 head, HASS's layout"),
        ("dflash", {"markov_head.markov_w1.weight": torch.zeros(96, 4)}, "DSpark head"),
        ("dflash", {"candidate_selector.successor_codebook": torch.zeros(96, 4)}, "DFlash2 head"),
        ("medusa", {"hydra_mlp.0.1.linear.weight": torch.zeros(32, 64)}, "Medusa heads, FasterDecoding's layout"),
    ],
)
def test_further_layouts_are_recognized_by_tensors(name: str, changed: dict[str, Tensor], layout: str) -> None:
    files = read_head(checkpoint(name))
    assert layout_of(replace(files, tensors=dict(files.tensors) | changed)).name == layout


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 head, SpecForge's layout"),
        ({"eagle_config": {}}, "EAGLE-3 head, ModelOpt's or SpecForge's layout"),
    ],
)
def test_publishers_are_recognized_by_configuration(config: dict[str, Any], layout: str) -> None:
    files = read_head(checkpoint("eagle3"))
    assert layout_of(replace(files, config=files.config | config)).name == layout


def test_a_peagle_head_fits_in_either_mask_format(tmp_path: Path) -> None:
    tensors = dict(read_head(checkpoint("eagle3")).tensors) | {"mask_hidden": torch.zeros(1, 1, 96)}
    folder = copied(tmp_path, "eagle3", tensors, pard_token=3)
    found = inspect_draft(folder, TARGET)
    assert (found.mismatches, loads("eagle", folder)) == ((), True)
    assert "predicts several tokens in one forward, by mask token 3" in found.facts.conventions


def test_medusa_heads_report_a_shared_lm_head(tmp_path: Path) -> None:
    tensors = read_head(checkpoint("medusa")).tensors
    blocks = {f"blocks.{key[0]}.layers.0{key[len('0.0.linear') :]}": t for key, t in tensors.items() if "linear" in key}
    folder = copied(tmp_path, "medusa", blocks, original_lm_head=True)
    found = inspect_draft(folder, TARGET)
    assert (found.mismatches, loads("medusa", folder)) == ((), True)
    assert (found.facts.lm_head, found.facts.vocabulary) == ("the target", None)
    assert inspect_draft(folder).fits
    said = copied(tmp_path, "medusa", blocks, original_lm_head=True, vocab_size=90)
    assert [misfit.what for misfit in inspect_draft(said, TARGET).mismatches] == ["LM head borrowed from the target"]


def test_checkpoints_without_a_method_do_not_fit(tmp_path: Path) -> None:
    tensors = dict(read_head(checkpoint("dflash")).tensors) | {"prefix_gru.weight_hh_l0": torch.zeros(9, 3)}
    found = inspect_draft(copied(tmp_path, "dflash", tensors), TARGET)
    assert (found.facts.layout.name, found.snippet) == ("Domino head", "")
    assert found.mismatches == (Mismatch("layout", "a layout that this release supports", "Domino head"),)


# ---------------------------------------------------------------- misfits


@every_head
def test_missing_and_misshapen_tensors_are_reported_as_by_the_loader(name: str, tmp_path: Path) -> None:
    tensors = read_head(checkpoint(name)).tensors
    method = KNOWN[name]["method"]
    for key in tensors:
        missing = copied(tmp_path, name, {other: tensor for other, tensor in tensors.items() if other != key})
        assert inspect_draft(missing, TARGET).fits == loads(method, missing), f"without {key}"
        if key == "t2d":
            continue
        longer = torch.cat([tensors[key], tensors[key][:1]])
        wrong = copied(tmp_path, name, {**tensors, key: longer})
        assert inspect_draft(wrong, TARGET).fits == loads(method, wrong), f"with a longer {key}"


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "dflash", "medusa", "mlp_speculator"])
def test_extra_tensors_are_reported_as_by_the_loader(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path, name, dict(read_head(checkpoint(name)).tensors) | {"gate.weight": torch.ones(3)})
    assert inspect_draft(folder, TARGET).mismatches == (
        Mismatch("tensor gate.weight", "none: this layout does not use it", "one"),
    )
    assert not loads(KNOWN[name]["method"], folder)


def test_misfits_name_expected_and_found_values(tmp_path: Path) -> None:
    tensors = dict(read_head(checkpoint("dflash")).tensors)
    del tensors["layers.0.self_attn.q_norm.weight"]
    tensors["norm.weight"] = torch.ones(31)
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    said = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(said | {"hidden_size": 16, "vocab_size": 90, "num_hidden_layers": 5})
    )
    found = inspect_draft(copied(tmp_path, "dflash", tensors), target)
    assert [(misfit.what, misfit.expected, misfit.found) for misfit in found.mismatches] == [
        ("tensor layers.0.self_attn.q_norm.weight", "shape (16,)", "none"),
        ("tensor norm.weight", "shape (32,)", "shape (31,)"),
        ("hidden size of the target", "32", "16"),
        ("vocabulary of the target", "96", "90"),
        ("layers of the target", "8", "5"),
        ("states of the target", "[2, 4, 6]", "0 to 5"),
    ]


def test_ids_outside_the_vocabulary_do_not_fit(tmp_path: Path) -> None:
    folder = altered(tmp_path, "eagle3", lambda tensors: tensors | {"d2t": tensors["d2t"] + 60})
    (misfit,) = inspect_draft(folder, TARGET).mismatches
    assert "expected distinct ids below 96" in str(misfit)
    assert not loads("eagle", folder)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    shutil.copy(checkpoint("medusa") / "config.json", tmp_path)
    torch.save({"0.0.linear.weight": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="cannot be read as tensors alone"):
        inspect_draft(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        inspect_draft(tmp_path)
