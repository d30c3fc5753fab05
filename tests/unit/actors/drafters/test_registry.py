"""Drafting methods by name, and what a method imports."""

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch

from actors.drafters import registry
from actors.drafters.registry import MODULES, DraftSetup, capture_spec, create_method, states_format, states_needed
from cluster import config
from cluster.config import DraftPool
from cluster.config_sections import STATE_READERS, NgramOptions, StatesOptions
from protos.messages import StateDtype, StatesFormat, StatesNeeded
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.cluster.samples import an_open

SETUP = DraftSetup("float32", max_context=64, draft_tokens=4, target_tokens={1: "a"}, target="org/target")


def test_the_methods_are_those_of_the_configuration() -> None:
    assert set(MODULES) == set(get_args(DraftPool.model_fields["method"].annotation))


@pytest.mark.parametrize("module", MODULES.values())
def test_each_can_be_created(module: str) -> None:
    assert callable(import_module(module).create)


def test_prompt_lookup_is_made_of_its_section() -> None:
    tokens = (1, 2, 3, 9, 2, 3)
    want = Want(an_open("s", tokens=tokens), tokens, 1, max_tokens=2)
    for shortest, found in ((2, (9, 2)), (3, ())):
        options = NgramOptions(max_ngram=3, min_ngram=shortest)
        method = create_method(DraftPool(method="ngram", ngram=options), SETUP)
        (proposal,) = propose(method, [want])
        assert proposal.tokens == found


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
    """Replaces a configured method."""
    readers = frozenset({"ngram"})
    monkeypatch.setattr(registry, "MODULES", {"ngram": "tests.unit.actors.drafters.state_reader"})
    monkeypatch.setattr(registry, "STATE_READERS", readers)
    monkeypatch.setattr(config, "STATE_READERS", readers)


@pytest.mark.usefixtures("reader")
def test_a_method_that_reads_states_says_which_and_projects_them_at_the_target() -> None:
    """The rank that captures is another process."""
    draft = DraftPool(method="ngram", states=StatesOptions(dtype="float8"))
    assert states_needed(draft, TARGET) == StatesNeeded((1, 2, 3), 24, 8)
    assert states_format(draft, TARGET) == StatesFormat(8, StateDtype.FLOAT8)
    spec = pickle.loads(pickle.dumps(capture_spec(draft, TARGET, "float32")))
    assert (spec.layers, spec.format) == ((1, 2, 3), StatesFormat(8, StateDtype.FLOAT8))
    assert spec.load_projection is not None
    project = spec.load_projection(torch.device("cpu"))
    assert torch.equal(project(torch.ones(2, 24)), torch.full((2, 8), 12.0))


@pytest.mark.usefixtures("reader")
def test_or_leaves_the_projection_to_the_drafter() -> None:
    draft = DraftPool(method="ngram", states=StatesOptions(project="drafter"))
    spec = capture_spec(draft, TARGET, "float32")
    assert spec is not None
    assert spec.format == states_format(draft, TARGET) == StatesFormat(24, StateDtype.BFLOAT16)
    assert spec.load_projection is None
