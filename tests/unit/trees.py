"""Random trees of draft tokens."""

from random import Random

from hypothesis import strategies as st

from protos.draft_tree import DraftTree


def grown(rng: Random, nodes: int, vocabulary: int) -> DraftTree:
    """Returns a random tree of at most `most` nodes; siblings have distinct tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(nodes):
        child = (rng.randrange(-1, len(tokens)), rng.randrange(vocabulary))
        if child not in taken:
            taken.add(child)
            parents.append(child[0])
            tokens.append(child[1])
    return DraftTree(tuple(tokens), tuple(parents))


def trees(vocabulary: int, nodes: int = 8) -> st.SearchStrategy[DraftTree]:
    """Draws trees of zero to `most` nodes."""
    return st.builds(
        lambda seed, count: grown(Random(seed), count, vocabulary), st.integers(0, 2**32), st.integers(0, nodes)
    )
