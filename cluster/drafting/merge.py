"""One draft tree from the candidates of two methods: the likeliest paths of both.

Each method gives probabilities for its own tokens. The errors of the two are assumed independent, so a token that both
name has the probability 1 - (1 - a)(1 - b). If the probabilities of different tokens at one place then add up to more
than 1, they are scaled down. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cluster.drafting.candidates.tree_growth import Path, likeliest_of, tree_of
from cluster.drafting.requests import Proposal


def merged(one: Proposal, other: Proposal, most: int, least_chance: float) -> Proposal:
    """Returns at most `most` nodes from two blocks for the same prefix, in falling order of probability.

    The first node is kept even if it is below `least_chance`, as in any block.
    """
    assert (one.base_len, one.prefix_hash) == (other.base_len, other.prefix_hash), "they are for different prefixes"
    if not (one.tokens and other.tokens):
        return one if one.tokens else other
    paths = likeliest_of(combined(_given(one), _given(other)), most, least_chance)
    tree = tree_of(paths)
    judged = next((each for each in (one, other) if each.confidence is not None), other)
    return replace(
        judged,
        tree=tree,
        confidence=judged.confidence if judged.tokens[0] == tree.tokens[0] else None,
        chances=tuple([chance for _, chance in paths]),
        chance=max(one.chance, other.chance),
    )


def combined(one: Mapping[Path, float], other: Mapping[Path, float]) -> dict[Path, float]:
    """Returns cumulative path probabilities from two methods' conditional ones.

    The inputs give, for each path, the probability of its last token given the tokens before it.
    """
    given = {path: 1 - (1 - one.get(path, 0.0)) * (1 - other.get(path, 0.0)) for path in {**one, **other}}
    totals: defaultdict[Path, float] = defaultdict(float)  # sum over the tokens that follow each path
    for path, chance in given.items():
        totals[path[:-1]] += chance
    reached: dict[Path, float] = {(): 1.0}
    for path in sorted(given, key=len):
        before = path[:-1]
        reached[path] = reached[before] * given[path] / max(1.0, totals[before])
    del reached[()]
    return reached


def _given(proposal: Proposal) -> dict[Path, float]:
    """Returns, for each path, the probability of its last token given the tokens before it."""
    assert len(proposal.chances) == len(proposal.tokens), "this method gave no chances"
    tree = proposal.tree
    chances = proposal.chances
    return {
        tuple([tree.tokens[at] for at in nodes]): chances[nodes[-1]] / (chances[nodes[-2]] if len(nodes) > 1 else 1.0)
        for nodes in tree.paths
    }
