"""What the figures about the code count, on sources of a few lines."""

from pathlib import Path

import pytest

from tests.unit.benchmarks.scripts import script

ROOT = Path(__file__).parents[3]


code_figures = script("code_figures")


def a_module(text: str, path: str = "cluster/some.py"):
    return code_figures.Module(path, text)


def test_a_constant_is_an_upper_case_name_for_numbers():
    text = "A = 1\nB, C = 2.0, -3\nD = 60 * 60\nE = (1, 2)\nF = A + 1\nlower = 1\nG = 'text'\nH = True\nI = call()\n"
    assert code_figures.constants(a_module(text)) == ["A", "B", "C", "D", "E", "F"]
    assert code_figures.constants(a_module("def f():\n    A = 1\n")) == []


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("a, b = 1, 2", True),
        ("(a.x, b[0]) = [1, 2]", True),
        ("a = 1", False),
        ("a, b = pair", False),  # one value, of two parts
        ("a = 1, 2", False),
        ("for a, b in ((1, 2),): pass", False),
    ],
)
def test_several_values_are_assigned_where_both_sides_list_them(line, counts):
    assert code_figures.several_assigned(a_module(f"\n{line}\n")) == ([2] if counts else [])


@pytest.mark.parametrize(
    ("caught", "counts"),
    [
        ("", True),
        (" Exception", True),
        (" BaseException as error", True),
        (" (ValueError, Exception)", True),
        (" ValueError", False),
        (" (ValueError, KeyError) as error", False),
        (" errors.Exception", False),
    ],
)
def test_an_except_is_broad_if_it_catches_everything(caught, counts):
    text = f"try:\n    pass\nexcept{caught}:\n    pass\n"
    assert code_figures.broad_excepts(a_module(text)) == ([3] if counts else [])


def test_lengths_go_from_the_first_line_to_the_last():
    text = "class A:\n    x = 1\n\n    @property\n    def f(self):\n        '''Doc.'''\n        return 1\n"
    assert code_figures.class_lengths(a_module(text)) == [(7, "cluster.some.A")]
    assert code_figures.function_lengths(a_module(text)) == [3]


def test_a_circle_may_lead_over_several_rooms_and_is_named_once():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert code_figures.circles(imports) == [["a", "b", "c"], ["e", "f"]]
    assert code_figures.circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_a_room_is_a_folder_or_a_module_at_the_top():
    modules = [
        a_module(
            "from cluster.speculation.controller import Gate\nfrom cluster.errors import E\n",
            "cluster/routing/ledger.py",
        ),
        a_module(
            "from cluster import errors\nimport torch\nfrom torch import Tensor\n", "cluster/speculation/controller.py"
        ),
        a_module("from cluster.routing.ledger import S\n", "cluster/routing/__init__.py"),
        a_module("", "cluster/errors.py"),
    ]
    assert code_figures.imports_by_room(modules) == {
        "cluster.routing": {"cluster.speculation", "cluster.errors"},
        "cluster.speculation": {"cluster.errors"},
        "cluster.errors": set(),
    }


def test_pacing_is_its_folder_and_the_modules_that_belong_to_it():
    paths = [
        "cluster/speculation/controller.py",
        "cluster/costs.py",
        "cluster/breaker.py",
        "cluster/config.py",
        "actors/load.py",
    ]
    assert [code_figures.is_pacing(a_module("", path)) for path in paths] == [True, True, True, False, False]


def test_a_tree_is_read_without_what_is_generated(tmp_path):
    for path in ("protos/speculation_pb2.py", "protos/codec.py", "cluster/routing/ledger.py", "tests/test_it.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    assert [module.path for module in code_figures.read(tmp_path)] == ["cluster/routing/ledger.py", "protos/codec.py"]


def test_this_tree_can_be_measured():
    shown = code_figures.figures(code_figures.read(ROOT))
    assert shown["rooms that import each other in circles"] == "0"
    assert int(shown["pacing: lines"]) > 0
