"""vLLM loads parts of the adapter by name, and each name must exist."""

import ast
from pathlib import Path

import pytest

import actors.vllm_engine
from actors.vllm_engine.arguments import PACKAGE, engine_arguments
from cluster.config import validated
from cluster.errors import ConfigError

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


@pytest.mark.parametrize(
    ("gpus", "first_runner", "own", "expected"),
    [
        (1, False, {}, {"cudagraph_mode": "FULL"}),
        (1, False, {"compilation_config": {"level": 1}}, {"cudagraph_mode": "FULL", "level": 1}),
        (
            1,
            False,
            {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
            {"cudagraph_mode": "PIECEWISE"},
        ),
        (1, False, {"compilation_config": 2}, 2),
        (1, True, {}, None),
        (0, False, {}, None),
    ],
)
def test_steps_are_captured_whole_on_gpus_unless_configured(
    gpus: int, first_runner: bool, own: dict[str, object], expected: object
) -> None:
    target = {"engine": "vllm", "resources_per_rank": {"num_gpus": gpus}, "cache_per_rank": {"gib": 1}, "vllm": own}
    config = validated({"model": {"target": "TARGET"}, "draft": {"method": "ngram"}, "target": target})
    assert engine_arguments(config, "TARGET", 100, first_runner).get("compilation_config") == expected


def test_captured_layers_are_part_of_what_identifies_a_compiled_model() -> None:
    config = validated({"model": {"target": "TARGET"}, "draft": {"method": "ngram"}})
    found = [engine_arguments(config, "TARGET", 100, False, layers)["additional_config"] for layers in ((), (1, 2))]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"resources_per_rank": {"num_gpus": 0.5}}, "vLLM uses one whole GPU for each rank; set it to 1"),
        ({"resources_per_rank": {"num_gpus": 2}}, "vLLM uses one whole GPU for each rank; set it to 1"),
        (
            {"resources_per_rank": {"num_gpus": 1}, "vllm": {"distributed_executor_backend": "mp"}},
            "is mp, whose ranks would not use the GPUs",
        ),
        ({"vllm": {"enable_batch_sharded_sampling": True}}, "enable_batch_sharded_sampling cannot be set: every rank"),
    ],
)
def test_what_vllm_hangs_or_errs_on_is_refused(target: dict[str, object], message: str) -> None:
    base = {"engine": "vllm", "cache_per_rank": {"gib": 1}}
    with pytest.raises(ConfigError, match=message):
        validated({"model": {"target": "TARGET"}, "draft": {"method": "ngram"}, "target": base | target})
