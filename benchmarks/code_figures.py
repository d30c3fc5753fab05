"""Reports the size and readability of a source tree, alone or beside an earlier one.

    python benchmarks/code_figures.py [TREE] [--against EARLIER_TREE] [--since COMMIT]

Parses sources without importing them, so it works on any tree of this project. Excludes generated stubs.

The request path is an upper bound: every module reached by imports, lazy ones included, from the HTTP application, the
router and the actors' servers (`ROOTS`). Imports under `TYPE_CHECKING` do not count. A form is a dataclass, a `@value`
class, a NamedTuple or a pydantic model in one of these modules, unless "config" is part of the module's name.

`--since` measures the subjects of each tree's commits after that commit.
"""

import argparse
import ast
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

PACKAGES = ("protos", "cluster", "actors", "serve_app", "tools")
GENERATED = "speculation_pb2"
ROOTS = (
    "serve_app.api.routes",
    "serve_app.api.app",  # its earlier name
    "serve_app.http.api",
    "serve_app.router",
    "actors.servers",
    "actors.target",
    "actors.drafter",
)
FORM_DECORATORS = {"dataclass", "value"}
FORM_BASES = {"NamedTuple", "BaseModel"}
QUESTION_WORDS = {"how", "what", "when", "where", "whether", "which", "who", "whom", "whose", "why"}
PREPOSITIONS = {"after", "as", "at", "before", "by", "for", "from", "in", "of", "on", "to", "under", "until", "with"}


class Tree:
    """Sources, tests and documents of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
        self.sources = {
            _dotted(path.relative_to(root)): path.read_text()
            for path in sorted(paths)
            if not path.name.startswith(GENERATED)
        }

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        return {name: ast.parse(text) for name, text in self.sources.items()}

    def lines(self, package: str) -> int:
        texts = [text for name, text in self.sources.items() if name.split(".")[0] == package]
        return sum(len(text.splitlines()) for text in texts)

    @property
    def test_lines(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in (self.root / "tests").rglob("*.py"))

    @property
    def document_words(self) -> int:
        folders = [self.root / name for name in ("docs", "examples", "k8s")]
        paths = [*self.root.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
        return sum(len(path.read_text().split()) for path in paths)

    def request_path(self) -> list[str]:
        """Returns the names of the modules on the request path."""
        reached: set[str] = set()
        pending = [root for root in ROOTS if root in self.sources]
        while pending:
            name = pending.pop()
            if name not in reached:
                reached.add(name)
                pending += self._imports(name)
        return sorted(reached)

    def _imports(self, module: str) -> Iterator[str]:
        for node in _runtime_nodes(self.syntax[module]):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from {name if name in self.sources else node.module for name in names} & self.sources.keys()
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.sources)

    def request_forms(self) -> list[str]:
        """Returns the names of the forms on the request path."""
        classes = [
            (name, node)
            for name in self.request_path()
            if "config" not in name
            for node in ast.walk(self.syntax[name])
            if isinstance(node, ast.ClassDef)
        ]
        models = set(FORM_BASES)
        while new := {node.name for _, node in classes if models & set(map(_last_name, node.bases))} - models:
            models |= new
        return [
            f"{name}.{node.name}"
            for name, node in classes
            if node.name in models or FORM_DECORATORS & set(map(_last_name, node.decorator_list))
        ]

    def indirect_docstrings(self) -> float:
        """Returns the share of docstrings that start with a bare preposition or a wh-word."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for syntax in self.syntax.values() for node in ast.walk(syntax) if isinstance(node, kinds)]
        first_words = [text.split()[0].lower().strip(",;:") for node in nodes if (text := ast.get_docstring(node))]
        return sum(word in QUESTION_WORDS | PREPOSITIONS for word in first_words) / max(1, len(first_words))

    def subject_lengths(self, since: str) -> list[int]:
        """Returns the lengths of the subjects of commits after `since`."""
        command = ["git", "-C", str(self.root), "log", "--no-merges", "--format=%s", f"{since}..HEAD"]
        return [len(line) for line in subprocess.check_output(command, text=True).splitlines()]

    def figures(self, since: str | None = None) -> dict[str, str]:
        """Returns all figures by name."""
        found = {"modules": str(len(self.sources))}
        found |= {f"lines in {package}": str(self.lines(package)) for package in PACKAGES}
        found |= {
            "lines of code": str(sum(map(self.lines, PACKAGES))),
            "lines of tests": str(self.test_lines),
            "words of documents": str(self.document_words),
            "modules on the request path": str(len(self.request_path())),
            "forms on the request path": str(len(self.request_forms())),
            "indirect docstrings": f"{self.indirect_docstrings():.1%}",
        }
        if since and (lengths := self.subject_lengths(since)):
            found["commit subjects: median length"] = f"{median(lengths):g}"
            found["commit subjects: longest"] = str(max(lengths))
        return found


def _dotted(path: Path) -> str:
    return path.as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below, except the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _runtime_nodes(child)


def _last_name(node: ast.expr) -> str:
    """Returns the last part of a possibly dotted, called or subscripted name."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _table(columns: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table("", *columns, title="The code in figures")
    for row in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(row, *(column.get(row, "-") for column in columns.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", type=Path, metavar="EARLIER_TREE")
    parser.add_argument("--since", metavar="COMMIT")
    arguments = parser.parse_args()
    tree = Tree(arguments.tree)
    columns = {"now": tree.figures(arguments.since)}
    if arguments.against is not None:
        columns = {"before": Tree(arguments.against).figures(arguments.since)} | columns
    console = Console()
    console.print(_table(columns))
    console.print("Modules on the request path:", *tree.request_path(), sep="\n  ")
    console.print("Forms on the request path:", *tree.request_forms(), sep="\n  ")


if __name__ == "__main__":
    main()
