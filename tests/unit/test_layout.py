"""Import rules: packages import in one direction, and folders have no import cycles."""

import ast
import graphlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.regenerate import stale_stubs

ROOT = Path(__file__).parents[2]
LAYERS = ("protos", "cluster", "actors", "serve_app", "tools")
GENERATED = {"speculation_pb2.py", "speculation_pb2_grpc.py"}
FORBIDDEN = {  # forbidden imports by package
    "protos": {"torch", "transformers", "ray", "fastapi", "starlette", "pydantic", "pickle"},
    "cluster": {"torch", "transformers", "fastapi", "starlette", "httpx", "grpc", "ray", "pickle"},
    "actors": {"fastapi", "starlette", "httpx"},
    "serve_app": {"pickle"},
}
MAY = {Path("cluster/routing/ray_membership.py"): {"ray"}}  # the one adapter


def imported(path: Path) -> Iterator[str]:
    """Returns the top-level names of all imports in a module, including nested ones."""
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
        wrong = (above | FORBIDDEN.get(package, set()) | {"tests"}) - MAY.get(path.relative_to(ROOT), set())
        assert not wrong & set(imported(path)), f"{path.relative_to(ROOT)} looks the wrong way"


def test_the_vllm_adapter_is_still_needed():
    """An unused exception to the rules must be removed."""
    for path, allowed in MAY.items():
        assert allowed <= set(imported(ROOT / path))


def package_of(dotted: str) -> str:
    """Returns the folder of a module or of a name in it; a top-level module of a package counts as a folder."""
    parts = dotted.split(".")
    while not (ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    if ROOT.joinpath(*parts).is_dir() or len(parts) <= 2:
        return ".".join(parts)
    return ".".join(parts[:-1])


def packages_imported() -> dict[str, set[str]]:
    """Returns the other folders that each folder's modules import."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in LAYERS:
        for path in modules(package):
            room = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in LAYERS:
                    found[room] |= {package_of(f"{node.module}.{alias.name}") for alias in node.names} - {room}
    return found


def test_no_two_rooms_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(packages_imported()).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_a_docstring(package):
    for path in modules(package):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_light_packages_import_nothing_heavy():
    """Light packages must import without torch; only a separate process can show this."""
    code = (
        "import importlib, sys\n"
        "names = 'actors protos.codec cluster.config cluster.routing.ledger'\n"
        "names += ' cluster.verification.scheduler cluster.drafting.scheduler'\n"
        "for name in names.split(): importlib.import_module(name)\n"
        "print(*sorted({'torch', 'ray', 'transformers', 'fastapi', 'grpc'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_committed_stubs_are_what_the_proto_generates():
    assert stale_stubs() == []
