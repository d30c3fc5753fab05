"""Tests drafting methods by name, their imports, and the method that drafts with the target's own layers."""

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from actors.drafters import registry
from actors.drafters.registry import MODULES, DraftSetup, capture_spec, create_method, states_format, states_needed
from cluster import config
from cluster.config import CacheConfig, DraftPool
from cluster.config_sections import STATE_READERS, LayerSkipOptions, NgramOptions, StatesOptions
from cluster.drafting.method import DraftingMethod
from cluster.errors import ModelError
from protos.messages import StateDtype, StatesFormat, StatesNeeded
from tests.unit.actors.drafters.drafting import a_setup, block_of, wanted_block

SETUP = DraftSetup("float32", max_context=64, draft_tokens=4, target_tokens={1: "a"}, target="org/target")


def test_the_methods_are_those_of_the_configuration() -> None:
    assert set(MODULES) == set(get_args(DraftPool.model_fields["method"].annotation))


@pytest.mark.parametrize("module", MODULES.values())
def test_each_can_be_created(module: str) -> None:
    assert callable(import_module(module).create)


def test_prompt_lookup_is_made_of_its_section() -> None:
    for shortest, found in ((2, (9, 2)), (3, ())):
        options = NgramOptions(max_ngram=3, min_ngram=shortest)
        method = create_method(DraftPool(method="ngram", ngram=options), SETUP)
        assert block_of(method, wanted_block((1, 2, 3, 9, 2, 3), 2)).tokens == found


def test_a_method_without_a_model_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from actors.drafters.registry import MODULES\n"
        "import actors.drafters.lookup.ngram\n"
        "import actors.drafters.lookup.suffix\n"
        "print(*sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


TARGET = Path("target")
NAMED = DraftPool(method="ngram")


@pytest.mark.parametrize("method", sorted(MODULES.keys() - STATE_READERS))
def test_other_methods_read_nothing_of_the_target(method: str) -> None:
    draft = NAMED.model_copy(update={"method": method})
    assert states_needed(draft, TARGET) is None
    assert states_format(draft, TARGET) is None
    assert capture_spec(draft, TARGET, "float32") is None


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the state-reading module in place of a configured method."""
    readers = frozenset({"ngram"})
    monkeypatch.setattr(registry, "MODULES", {"ngram": "tests.unit.actors.drafters.state_reader"})
    monkeypatch.setattr(registry, "STATE_READERS", readers)
    monkeypatch.setattr(config, "STATE_READERS", readers)


@pytest.mark.usefixtures("reader")
def test_a_method_that_reads_states_names_them_and_projects_them_at_the_target() -> None:
    """The capturing rank is another process."""
    draft = DraftPool(method="ngram", states=StatesOptions(dtype="float8"))
    assert states_needed(draft, TARGET) == StatesNeeded((1, 2, 3), 24, 8)
    assert states_format(draft, TARGET) == StatesFormat(8, StateDtype.FLOAT8)
    spec = pickle.loads(pickle.dumps(capture_spec(draft, TARGET, "float32")))
    assert (spec.layers, spec.format) == ((1, 2, 3), StatesFormat(8, StateDtype.FLOAT8))
    assert spec.load_projection is not None
    project = spec.load_projection(torch.device("cpu"))
    assert torch.equal(project(torch.ones(2, 24)), torch.full((2, 8), 12.0))


@pytest.mark.usefixtures("reader")
def test_without_a_target_projection_the_drafter_projects() -> None:
    draft = DraftPool(method="ngram", states=StatesOptions(project="drafter"))
    spec = capture_spec(draft, TARGET, "float32")
    assert spec.format == states_format(draft, TARGET) == StatesFormat(24, StateDtype.BFLOAT16)
    assert spec.load_projection is None


# ---------------------------------------------------------------- layer skip


HEADS = Path(__file__).parents[3] / "data" / "heads"
CASE = np.load(HEADS / "layer_skip" / "case.npz")


def layer_skip(layers: int | tuple[int, ...]) -> DraftingMethod:
    draft = DraftPool(
        method="layer_skip", layer_skip=LayerSkipOptions(layers=layers), cache=CacheConfig(page_size=4, gib=0.001)
    )
    return create_method(draft, a_setup(draft))


def test_it_drafts_what_the_reference_drafts() -> None:
    want = wanted_block((*CASE["input_ids"].tolist(), int(CASE["next_token"])), 5)
    expected = tuple(CASE["chain_tokens"].tolist())
    for layers in (3, (0, 1, 2)):
        assert block_of(layer_skip(layers), want).tokens == expected
    assert block_of(layer_skip((0, 1, 7)), want).tokens != expected


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match="layers 0 to 7, but layers 9 are asked for"):
        layer_skip((0, 9))
