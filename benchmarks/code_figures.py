"""How large and how entangled the code is, in figures, and what has become of them.

    python benchmarks/code_figures.py [TREE] [--against EARLIER_TREE]

Reads the sources alone and imports none of them, so that any tree of this project can be measured, also one from
before modules moved. Generated stubs are left out everywhere. A room is a folder, and a module at the top of a package
is a room of its own; two rooms are in a circle if each leads to the other over imports.

Pacing is everything that learns from measurements, or decides how far to draft, how long to wait and whom to leave out:
13 modules of `cluster` before it had a folder, and today the folder with those of them that went elsewhere.
"""

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

PACKAGES = ("protos", "cluster", "actors", "serve_app")
GENERATED = "speculation_pb2"
UNNAMED = {"__init__", "__main__"}  # of which every folder may have one
PACING_FOLDERS = ("cluster/pacing/", "cluster/speculation/")
PACING_MODULES = {
    # where each was, and where it went unless that is the folder
    *("cluster/acceptance_counts.py", "cluster/draft_delay.py", "cluster/load.py", "cluster/pacing.py"),
    *("cluster/step_cost.py", "cluster/track_record.py", "cluster/yields.py"),
    *("cluster/breaker.py", "cluster/routing/circuit_breaker.py"),
    *("cluster/cadence.py", "cluster/drafting/timing/step_interval.py"),
    *("cluster/draft_timing.py", "cluster/drafting/timing/pass_timing.py", "cluster/drafting/timing/pass_time.py"),
    *("cluster/step_timing.py", "cluster/verification/step_timing.py", "cluster/verification/step_deadline.py"),
    *("cluster/backpressure.py", "cluster/drafting/backpressure.py"),
    "cluster/costs.py",
}
BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to its tree, with slashes."""

    path: str
    text: str

    @property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def folder(self) -> str:
        return str(Path(self.path).parent)

    @property
    def dotted(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read(tree: Path) -> list[Module]:
    paths = sorted(path for package in PACKAGES for path in (tree / package).rglob("*.py"))
    written = [path for path in paths if not path.name.startswith(GENERATED)]
    return [Module(path.relative_to(tree).as_posix(), path.read_text()) for path in written]


# ---------------------------------------------------------------- what is counted


def modules_by_folder(modules: Iterable[Module]) -> Counter[str]:
    return Counter(module.folder for module in modules if module.name not in UNNAMED)


def is_pacing(module: Module) -> bool:
    return module.path.startswith(PACING_FOLDERS) or module.path in PACING_MODULES


def constants(module: Module) -> list[str]:
    """UPPER_CASE names that the module gives a number, or several."""
    found: list[str] = []
    for statement in module.syntax.body:
        if isinstance(statement, ast.Assign) and _is_number(statement.value):
            names = [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            found += filter(str.isupper, names)
    return found


def _is_number(value: ast.expr) -> bool:
    """Whether numbers are all that it is made of, at least one."""
    parts = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return bool(parts) and all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts)


def class_lengths(module: Module) -> list[tuple[int, str]]:
    classes = [node for node in ast.walk(module.syntax) if isinstance(node, ast.ClassDef)]
    return [(_length(node), f"{module.dotted}.{node.name}") for node in classes]


def function_lengths(module: Module) -> list[int]:
    """From each `def` to its end, docstring included, decorators not."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [_length(node) for node in ast.walk(module.syntax) if isinstance(node, kinds)]


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def several_assigned(module: Module) -> list[int]:
    """Lines that assign several values that they list to several names that they list."""
    displays = (ast.Tuple, ast.List)
    return [
        node.lineno
        for node in ast.walk(module.syntax)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, displays)
        and any(isinstance(target, displays) for target in node.targets)
    ]


def broad_excepts(module: Module) -> list[int]:
    """Lines that catch every exception."""
    handlers = [node for node in ast.walk(module.syntax) if isinstance(node, ast.ExceptHandler)]
    return [handler.lineno for handler in handlers if _is_broad(handler.type)]


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in BROAD)


def names_twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


def class_names(module: Module) -> list[str]:
    return [node.name for node in module.syntax.body if isinstance(node, ast.ClassDef)]


# ---------------------------------------------------------------- who imports whom


def imports_by_room(modules: Iterable[Module]) -> dict[str, set[str]]:
    """By room: the others that it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        here = _room(module.dotted)
        found[here] |= {_room(name) for name in _imported(module)} - {here}
    return found


def _imported(module: Module) -> Iterator[str]:
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(dotted: str) -> str:
    return ".".join(dotted.split(".")[:2])


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms that lead to one another over imports, each such set once."""
    reached = {room: _reached(room, imports) for room in imports}
    together = {
        tuple(sorted(other for other in there if room in reached.get(other, ())))
        for room, there in reached.items()
        if room in there
    }
    return sorted(map(list, together))


def _reached(room: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [room]
    while ahead:
        new = imports.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


# ---------------------------------------------------------------- what is shown


def figures(modules: Sequence[Module]) -> dict[str, str]:
    """By what they are of."""
    pacing = [module for module in modules if is_pacing(module)]
    folders = modules_by_folder(modules)
    fullest = max(folders, key=lambda folder: folders[folder])
    longest, class_name = max(found for module in modules for found in class_lengths(module))
    functions = sorted(length for module in modules for length in function_lengths(module))
    files = names_twice(module.name for module in modules if module.name not in UNNAMED)
    classes = names_twice(name for module in modules for name in class_names(module))
    in_circles = circles(imports_by_room(modules))
    return {
        "modules": str(len(modules)),
        "lines": str(sum(module.lines for module in modules)),
        "folders": str(len(folders)),
        "most modules in a folder": f"{folders[fullest]} ({fullest})",
        "modules over 300 lines": str(sum(module.lines > 300 for module in modules)),
        "pacing: modules": str(len(pacing)),
        "pacing: lines": str(sum(module.lines for module in pacing)),
        "pacing: constants": str(sum(len(constants(module)) for module in pacing)),
        "largest class, lines": f"{longest} ({class_name.rpartition('.')[2]})",
        "functions": str(len(functions)),
        "function length: median": f"{median(functions):g}",
        "function length: 90th percentile": f"{functions[len(functions) * 9 // 10]}",
        "function length: longest": str(functions[-1]),
        "lines that assign several values": str(sum(len(several_assigned(module)) for module in modules)),
        "rooms that import each other in circles": str(sum(map(len, in_circles))),
        "excepts that catch everything": str(sum(len(broad_excepts(module)) for module in modules)),
        "file names used twice": f"{len(files)}{_listed(files)}",
        "class names used twice": f"{len(classes)}{_listed(classes)}",
    }


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def folders_table(trees: Mapping[str, Sequence[Module]]) -> Table:
    counted = {tree: modules_by_folder(modules) for tree, modules in trees.items()}
    rows = sorted(set().union(*counted.values()))
    return _table("Modules in each folder", {tree: {f: str(c[f] or "") for f in rows} for tree, c in counted.items()})


def _table(title: str, columns: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table("", *columns, title=title)
    for row in next(iter(columns.values())):
        table.add_row(row, *(column[row] for column in columns.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", type=Path, metavar="EARLIER_TREE")
    asked = parser.parse_args()
    trees = {"today": read(asked.tree)}
    if asked.against is not None:
        trees = {"before": read(asked.against)} | trees
    console = Console()
    console.print(_table("The code in figures", {tree: figures(modules) for tree, modules in trees.items()}))
    console.print(folders_table(trees))


if __name__ == "__main__":
    main()
