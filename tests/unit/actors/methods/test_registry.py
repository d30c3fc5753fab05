"""Which drafting methods there are, and what asking for one imports."""

import subprocess
import sys
from importlib import import_module
from typing import get_args

import pytest

from actors.methods.registry import MODULES, create_method
from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.draft_options import PromptLookupOptions
from tests.unit.actors.methods.asking import Want, propose
from tests.unit.cluster.samples import an_open

SETUP = DraftSetup("float32", max_context=64, max_draft_tokens=4, target_tokens={1: "a"}, target="org/target")


def test_the_methods_are_those_of_the_configuration() -> None:
    assert set(MODULES) == set(get_args(DraftPool.model_fields["method"].annotation))


@pytest.mark.parametrize("module", MODULES.values())
def test_each_can_be_created(module: str) -> None:
    assert callable(import_module(module).create)


def test_prompt_lookup_is_made_of_its_section() -> None:
    tokens = (1, 2, 3, 9, 2, 3)
    want = Want(an_open("s", tokens=tokens), tokens, 1, max_tokens=2)
    for shortest, found in ((2, (9, 2)), (3, ())):
        options = PromptLookupOptions(max_ngram=3, min_ngram=shortest)
        method = create_method(DraftPool(method="prompt_lookup", prompt_lookup=options), SETUP)
        (proposal,) = propose(method, [want])
        assert proposal.tokens == found


def test_a_method_without_a_model_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from actors.methods.registry import MODULES\n"
        "import actors.methods.lookup.prompt_lookup\n"
        "import actors.methods.lookup.suffix\n"
        "print(*sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
