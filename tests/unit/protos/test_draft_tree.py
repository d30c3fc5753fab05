"""Tests trees of draft tokens: their shape, and the remainder after a cut or after decided tokens."""

from hypothesis import given
from hypothesis import strategies as st

from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from tests.unit.trees import trees

VOCABULARY = 3  # few, so that branches share tokens
TREE = DraftTree((5, 6, 3, 6, 2), (-1, 0, -1, 2, 0))  # paths 5 6, 5 2 and 3 6
PROBS = SparseProbs(((5,), (6,), (7,)), ((1,), (2,), (3,)))


def texts(tree: DraftTree) -> set[tuple[int, ...]]:
    """Returns the path of tokens to each node."""
    return {tuple(tree.tokens[node] for node in path) for path in tree.paths}


def is_sound(tree: DraftTree) -> bool:
    """Returns whether parents precede their children, and siblings have distinct tokens."""
    children = list(zip(tree.parents, tree.tokens, strict=True))
    return all(-1 <= parent < node for node, parent in enumerate(tree.parents)) and len(set(children)) == len(children)


def test_a_chain_is_a_tree():
    chain = DraftTree.chain((5, 6, 7), PROBS)
    assert chain.parents == (-1, 0, 1)
    assert chain.is_chain
    assert NO_TREE.is_chain
    assert not TREE.is_chain
    assert not DraftTree((5, 6), (-1, -1)).is_chain


def test_depths_and_paths():
    assert TREE.depths == [0, 1, 0, 1, 1]
    assert TREE.paths == [(0,), (0, 1), (2,), (2, 3), (0, 4)]


def test_a_tree_is_followed_along_tokens_as_far_as_it_has_them():
    assert TREE.along((5, 2, 9)) == (0, 4)
    assert TREE.along((3, 6)) == (2, 3)
    assert TREE.along((2,)) == ()
    assert TREE.along(()) == ()


def test_the_rest_after_decided_tokens_is_a_tree():
    assert TREE.after((5,)) == DraftTree((6, 2), (-1, -1))
    assert TREE.after((3,)) == DraftTree((6,), (-1,))
    assert TREE.after((3, 6)) == NO_TREE
    assert TREE.after((4,)) == NO_TREE
    assert TREE.after(()) == TREE


def test_the_main_path_comes_first_and_siblings_share_a_parent():
    assert TREE.main_path == (5, 6)
    assert DraftTree.chain((5, 6)).main_path == (5, 6)
    assert NO_TREE.main_path == ()
    assert (TREE.children(-1), TREE.children(0), TREE.children(3)) == ((5, 3), (6, 2), ())


@given(trees(VOCABULARY), st.integers(0, 4))
def test_a_tree_within_a_depth_has_all_shorter_paths_and_no_other(tree, depth):
    kept = tree.within(depth)
    assert is_sound(kept)
    assert texts(kept) == {text for text in texts(tree) if len(text) <= depth}
    assert kept.depth == min(depth, tree.depth)


def test_probabilities_stay_with_their_tokens():
    chain = DraftTree.chain((5, 6, 7), PROBS)
    assert chain.after((5,)) == DraftTree.chain((6, 7), SparseProbs(((6,), (7,)), ((2,), (3,))))
    assert chain.first(1) == DraftTree.chain((5,), SparseProbs(((5,),), ((1,),)))
    assert chain.first(3) == chain


@given(trees(VOCABULARY), st.integers(0, 8))
def test_the_first_nodes_of_a_tree_are_a_tree(tree, count):
    kept = tree.first(count)
    assert len(kept) == min(count, len(tree))
    assert is_sound(kept)
    assert texts(kept) <= texts(tree)


@given(trees(VOCABULARY), st.lists(st.integers(0, VOCABULARY - 1), max_size=3).map(tuple))
def test_the_rest_of_a_tree_keeps_all_paths_with_the_decided_prefix(tree, decided):
    left = tree.after(decided)
    assert is_sound(left)
    assert {decided + text for text in texts(left)} == {
        text for text in texts(tree) if text[: len(decided)] == decided and len(text) > len(decided)
    }
