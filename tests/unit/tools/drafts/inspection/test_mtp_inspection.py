"""Tests inspection of targets with multi-token prediction modules."""

from pathlib import Path

import pytest
import torch
import yaml

from actors.drafters.heads.eagle.mtp import load_mtp
from actors.drafters.heads.files import read_headers
from cluster.config import validated
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET
from tests.unit.actors.drafters.heads.mtp_fixtures import (
    HIDDEN,
    LAYERS,
    LAYOUTS,
    VOCABULARY,
    Tensors,
    deepseek,
    mimo,
    qwen,
    target_with,
)
from tools.drafts.headers import CAUSAL, WITH_MTP, layout_of
from tools.drafts.inspection import inspect_draft


def numbered(tensors: Tensors, first: str, other: str) -> Tensors:
    """Returns a copy of a module's tensors under another module's names."""
    return tensors | {name.replace(first, other): tensor for name, tensor in tensors.items() if first in name}


TWO_DEEPSEEK = numbered(deepseek(), f"layers.{LAYERS}.", f"layers.{LAYERS + 1}.")
TWO_MIMO = numbered(mimo(), "mtp_layers.0.", "mtp_layers.1.")
TWO_QWEN = numbered(qwen(), "mtp.layers.0.", "mtp.layers.1.")


def loads(folder: Path) -> bool:
    try:
        load_mtp(folder, torch.float32, CPU, range(VOCABULARY))
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_named_twice", [False, True])
def test_a_target_with_mtp_is_recognized(tmp_path: Path, layout: str, is_named_twice: bool) -> None:
    folder = target_with(tmp_path, LAYOUTS[layout]())
    found = inspect_draft(folder, folder if is_named_twice else None)
    assert (found.facts.layout, found.mismatches, found.target) == (WITH_MTP, (), folder)
    states = found.facts.states
    assert (states.layers, states.is_final, states.width, states.projected) == ((LAYERS,), True, HIDDEN, None)
    whose = "the head" if layout == "deepseek" else "the target"
    assert (found.facts.embedding, found.facts.lm_head) == (whose, whose)
    assert found.notes[0].startswith("1 module in ")
    assert found.notes[0].endswith("draft.method: mtp drafts with it")
    config = validated(yaml.safe_load(found.snippet))
    assert (config.model.target, config.draft.method, config.draft.model) == (str(folder), "mtp", None)


def test_parameters_are_those_of_the_mtp_module(tmp_path: Path) -> None:
    module = mimo()
    size = inspect_draft(target_with(tmp_path, module)).facts.size
    assert size.parameters == sum(tensor.numel() for tensor in module.values())


@pytest.mark.parametrize(
    ("tensors", "is_drafted_with"),
    [(TWO_DEEPSEEK, True), (TWO_MIMO, True), (TWO_QWEN, False)],
    ids=["deepseek", "mimo", "qwen"],
)
def test_the_first_of_several_modules_is_used(tmp_path: Path, tensors: Tensors, is_drafted_with: bool) -> None:
    folder = target_with(tmp_path, tensors)
    found = inspect_draft(folder)
    assert (found.fits, loads(folder)) == (is_drafted_with, is_drafted_with)
    assert found.notes[0].startswith("2 modules in ")
    assert found.notes[0].endswith("drafts with the first module, once per token")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_and_misshapen_tensors_are_reported_as_by_the_loader(tmp_path: Path, layout: str) -> None:
    module = LAYOUTS[layout]()
    for key in module:
        missing = target_with(tmp_path, {name: tensor for name, tensor in module.items() if name != key})
        if layout_of(read_headers(missing)) is WITH_MTP:
            assert inspect_draft(missing).fits == loads(missing), f"without {key}"
        wrong = target_with(tmp_path, module | {key: torch.cat([module[key], module[key][:1]])})
        assert inspect_draft(wrong).fits == loads(wrong), f"with a longer {key}"


def test_an_unsupported_module_is_a_misfit(tmp_path: Path) -> None:
    experts = {f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight": torch.zeros(4, 4)}
    (misfit,) = inspect_draft(target_with(tmp_path, deepseek() | experts)).mismatches
    assert "experts and latent attention are not supported" in str(misfit)


def test_a_checkpoint_of_another_target_is_a_language_model(tmp_path: Path) -> None:
    assert inspect_draft(target_with(tmp_path, qwen()), TARGET).facts.layout is CAUSAL
