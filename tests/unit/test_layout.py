"""The shape of the code base: which package may import what, and that generated files are current."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.regenerate import stale_stubs

ROOT = Path(__file__).parents[2]
LAYERS = ("protos", "cluster", "actors", "serve_app")
GENERATED = {"speculation_pb2.py", "speculation_pb2_grpc.py"}
FORBIDDEN = {  # by package: what none of its modules may import, though it is installed
    "protos": {"torch", "transformers", "ray", "fastapi", "starlette", "pydantic"},
    "cluster": {"torch", "transformers", "fastapi", "starlette", "httpx", "grpc", "ray"},
    "actors": {"fastapi", "starlette", "httpx"},
    "serve_app": set(),
}
MAY = {Path("cluster/ray_membership.py"): {"ray"}}  # the one adapter


def imported(path: Path) -> Iterator[str]:
    """Top-level names of everything a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module).partition(".")[0]


def modules(package: str) -> list[Path]:
    found = [path for path in (ROOT / package).rglob("*.py") if path.name not in GENERATED]
    assert found, f"there is no package {package}"
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_one_way(package):
    above = set(LAYERS[LAYERS.index(package) + 1 :])
    for path in modules(package):
        wrong = (above | FORBIDDEN[package] | {"tests"}) - MAY.get(path.relative_to(ROOT), set())
        assert not wrong & set(imported(path)), f"{path.relative_to(ROOT)} looks the wrong way"


def test_the_one_adapter_is_still_needed():
    """An exception that nothing uses any more is a door left open."""
    for path, allowed in MAY.items():
        assert allowed <= set(imported(ROOT / path))


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_says_what_it_is_for(package):
    for path in modules(package):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_light_packages_import_nothing_heavy():
    """The mind must be importable where there is no torch; only a process of its own shows it."""
    code = (
        "import importlib, sys\n"
        "names = 'actors protos.codec cluster.config cluster.session cluster.verifier cluster.drafting'\n"
        "for name in names.split(): importlib.import_module(name)\n"
        "print(*sorted({'torch', 'ray', 'transformers', 'fastapi', 'grpc'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_committed_stubs_are_what_the_proto_generates():
    assert stale_stubs() == []
