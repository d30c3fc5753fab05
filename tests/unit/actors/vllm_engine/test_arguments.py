"""vLLM loads parts of the adapter by name, and each name must exist."""

import ast
from pathlib import Path

import pytest

import actors.vllm_engine
from actors.vllm_engine.arguments import PACKAGE, engine_arguments
from cluster.config import validated

FOLDER = Path(actors.vllm_engine.__file__).parent


def names_in(arguments: object) -> list[str]:
    """Yields all names within the package in nested arguments."""
    if isinstance(arguments, str):
        return [arguments] if arguments.startswith(f"{PACKAGE}.") else []
    children = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    return [name for child in children for name in names_in(child)]


@pytest.mark.parametrize("first_runner", [True, False])
def test_classes_that_vllm_loads_by_name_exist(first_runner: bool) -> None:
    """The test reads sources as text, because most of these modules import vLLM."""
    config = validated({"model": {"target": "TARGET"}, "draft": {"method": "ngram"}})
    names = names_in(engine_arguments(config, "TARGET", 100, first_runner))
    assert len(names) == 3
    for name in names:
        module, _, defined = name.replace(":", ".").removeprefix(f"{PACKAGE}.").partition(".")
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        assert defined in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name
