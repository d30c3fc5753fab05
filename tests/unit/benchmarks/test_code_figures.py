"""Tests code figures on source trees of a few lines."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.benchmarks.scripts import script

ROOT = Path(__file__).parents[3]

code_figures = script("code_figures")


def write_tree(root: Path, **texts: str) -> Path:
    """Writes files named like `serve_app__api__routes` into a tree."""
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_generated_modules_and_tests_are_not_sources(tmp_path: Path):
    names = ("protos__speculation_pb2", "protos__codec", "cluster__routing__ledger", "tests__test_it")
    tree = code_figures.Tree(write_tree(tmp_path, **dict.fromkeys(names, "x = 1\ny = 2\n")))
    assert sorted(tree.sources) == ["cluster.routing.ledger", "protos.codec"]
    assert (tree.lines("protos"), tree.lines("tools"), tree.test_lines) == (2, 0, 2)


def test_request_path_follows_runtime_imports(tmp_path: Path):
    app = (
        "from typing import TYPE_CHECKING\nfrom cluster import errors\nfrom cluster.ledger import Session\n"
        "if TYPE_CHECKING:\n    from cluster.typed import T\n"
        "def f():\n    import protos.codec\n"
    )
    unrelated = dict.fromkeys(("cluster__errors", "cluster__typed", "cluster__unused", "protos__codec"), "")
    tree = code_figures.Tree(
        write_tree(tmp_path, serve_app__api__routes=app, cluster__ledger="import os\n", **unrelated)
    )
    assert tree.request_path() == ["cluster.errors", "cluster.ledger", "protos.codec", "serve_app.api.routes"]


def test_forms_are_data_classes_on_the_request_path(tmp_path: Path):
    app = (
        "from cluster import config, other_module\n@dataclass(frozen=True)\nclass A: pass\n"
        "class B(pydantic.BaseModel): pass\nclass C(B): pass\n@value\nclass D: pass\nclass E(NamedTuple): pass\n"
        "class Plain: pass\n"
    )
    form = "@dataclass\nclass Other: pass\n"
    tree = code_figures.Tree(
        write_tree(tmp_path, serve_app__api__routes=app, cluster__config=form, cluster__unused=form)
    )
    assert tree.request_forms() == [f"serve_app.api.routes.{name}" for name in "ABCDE"]


@pytest.mark.parametrize(
    ("docstring", "share"),
    [("Of one router.", 1.0), ("What actors tell.", 1.0), ("Returns the share.", 0.0), ("Offline replay.", 0.0)],
)
def test_docstrings_that_start_with_a_preposition_or_wh_word(tmp_path: Path, docstring: str, share: float):
    tree = code_figures.Tree(write_tree(tmp_path, cluster__some=f'def f():\n    """{docstring}"""\n'))
    assert tree.indirect_docstrings() == share


def test_lengths_of_commit_subjects(tmp_path: Path):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    for subject in ("first", "four", "a longer subject"):
        git("commit", "--allow-empty", "-m", subject)
    assert sorted(code_figures.Tree(tmp_path).subject_lengths("HEAD~2")) == [4, 16]


def test_the_working_tree_can_be_measured():
    shown = code_figures.Tree(ROOT).figures()
    assert int(shown["lines of code"]) == sum(int(shown[f"lines in {name}"]) for name in code_figures.PACKAGES)
    assert 0 < int(shown["modules on the request path"]) < int(shown["modules"])
    assert int(shown["forms on the request path"]) > 0
