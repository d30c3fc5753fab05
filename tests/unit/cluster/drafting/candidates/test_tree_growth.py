"""A block consists of the likeliest paths anywhere in the tree."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafting.trees import (
    Branch,
    Choices,
    grow_branches,
    grown_paths,
    likeliest_paths,
    threshold_of,
    tree_of,
    worth_branching,
)
from protos.draft_tree import DraftTree

AT_FIRST = Choices((4, 5, 6, 7), (0.5, 0.3, 0.15, 0.05))
THEN = Choices((1, 2), (0.8, 0.2))
NOTHING = Choices((), ())
MAIN = Branch((), 1.0, (4, 1), (AT_FIRST, THEN))


def likeliest_tree(branches: list[Branch], most: int, least_chance: float) -> DraftTree:
    return tree_of(likeliest_paths(branches, most, least_chance))


def test_the_likelier_of_siblings_and_children_comes_first():
    tree = likeliest_tree([MAIN], 5, 0.0)
    assert tree == DraftTree((4, 1, 5, 6, 2), (-1, 0, -1, -1, 0))
    assert tree.main_path == (4, 1)
    assert tree.off_main_path == [(5,), (6,), (4, 2)]


@pytest.mark.parametrize("most", range(1, 7))
def test_the_first_nodes_of_a_tree_are_the_best_smaller_tree(most):
    assert likeliest_tree([MAIN], most, 0.0) == likeliest_tree([MAIN], 6, 0.0).first(most)


def test_nodes_below_the_least_chance_are_left_out_except_the_first():
    assert likeliest_tree([MAIN], 6, 0.2) == DraftTree((4, 1, 5), (-1, 0, -1))
    assert likeliest_tree([MAIN], 6, 0.9) == DraftTree((4,), (-1,))


def test_a_branch_continues_a_token_beside_the_main_path():
    branch = Branch((5,), 0.3, (8,), (Choices((8, 9), (0.9, 0.1)),))
    assert likeliest_tree([MAIN, branch], 4, 0.0) == DraftTree((4, 1, 5, 8), (-1, 0, -1, 2))


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 12))
def test_probabilities_fall_and_every_node_follows_its_parent(shares, most):
    choices = []
    for row in shares:
        chances = sorted((share / sum(row) for share in row), reverse=True)
        choices.append(Choices(tuple(range(len(row))), tuple(chances)))
    branch = Branch((), 1.0, (0,) * len(choices), choices)
    paths = likeliest_paths([branch], most, 0.0)
    everything = likeliest_paths([branch], 100, 0.0)
    assert paths == everything[:most]
    assert sum(min(2, len(row)) for row in shares) <= len(everything) <= sum(len(row) for row in shares)
    assert all(earlier[1] >= later[1] for earlier, later in pairwise(paths))
    seen: set[tuple[int, ...]] = {()}
    for path, _ in paths:
        assert path[:-1] in seen
        seen.add(path)


def test_branches_begin_where_children_may_be_among_the_likeliest():
    paths = likeliest_paths([MAIN], 4, 0.0)
    assert threshold_of(paths, 4) == pytest.approx(0.15)
    assert worth_branching(paths, MAIN.tokens, threshold_of(paths, 4)) == []
    assert worth_branching(paths, MAIN.tokens, 0.1) == [((5,), 0.3)]
    assert [path for path, _ in worth_branching(likeliest_paths([MAIN], 9, 0.0), MAIN.tokens, 0.0)] == [
        (5,),
        (6,),
        (4, 2),
    ]
    assert threshold_of(paths, 5) == 0.0, "more nodes fit"


@pytest.mark.parametrize("most", range(1, 7))
def test_a_tree_grown_at_once_has_the_likeliest_paths_and_expands_no_more_than_it_has(most):
    expanded: list[tuple[int, ...]] = []

    def after(path: tuple[int, ...]) -> Choices:
        expanded.append(path)
        return {(): AT_FIRST, (4,): THEN}.get(path, NOTHING)

    assert grown_paths(after, most, 0.0) == likeliest_paths([MAIN], most, 0.0)
    assert len(expanded) == most
    assert grown_paths(after, most, 0.2) == likeliest_paths([MAIN], most, 0.2)
    assert grown_paths(after, most, 0.9) == [], "the first one is below it too"


def after_many(path: tuple[int, ...]) -> Choices:
    """Returns the two next numbers as candidates; nothing follows 9."""
    last = path[-1] if path else 0
    return NOTHING if last == 9 else Choices((last + 1, last + 2), (0.6, 0.3))


@pytest.mark.parametrize("most", [1, 3, 6, 12])
@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_grown_branches_hold_the_likeliest_of_all_paths(most, least):
    paths = [(path, chance) for path, chance in every_path((), 1.0, most)]
    best = sorted(paths, key=lambda node: (-node[1], len(node[0])))[:most]
    expected = [node for rank, node in enumerate(best) if rank == 0 or node[1] >= least]
    found = likeliest_paths(grow_branches(after_many, most, least), most, least)
    assert [chance for _, chance in found] == pytest.approx([chance for _, chance in expected])
    assert set(dict(found)) <= set(dict(paths))


def every_path(path: tuple[int, ...], chance: float, deepest: int) -> list[tuple[tuple[int, ...], float]]:
    there = after_many(path)
    if len(path) == deepest:
        return []
    nexts = [((*path, token), chance * each) for token, each in there]
    return nexts + [found for node in nexts for found in every_path(*node, deepest)]
