"""One tree of two methods' candidates: the likeliest paths of both.

Each method gives its own tokens' chances, and the two are taken to be wrong independently: a token that both name comes
with 1 - (1 - a)(1 - b). What they give for different tokens of one place may add up to more than 1, and is scaled down
then. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cluster.drafting.candidates.tree_growth import Path, likeliest_of, tree_of
from cluster.drafting.requests import Proposal


def merged(one: Proposal, other: Proposal, most: int, least_chance: float) -> Proposal:
    """At most so many nodes of two blocks for the same tokens, in falling order of chance.

    The very first is there however unlikely it is, as in any block.
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
    """Chances of paths, from those of their last tokens if the tokens before stand, by two methods."""
    given = {path: 1 - (1 - one.get(path, 0.0)) * (1 - other.get(path, 0.0)) for path in {**one, **other}}
    totals: defaultdict[Path, float] = defaultdict(float)  # of the tokens after each path
    for path, chance in given.items():
        totals[path[:-1]] += chance
    reached: dict[Path, float] = {(): 1.0}
    for path in sorted(given, key=len):
        before = path[:-1]
        reached[path] = reached[before] * given[path] / max(1.0, totals[before])
    del reached[()]
    return reached


def _given(proposal: Proposal) -> dict[Path, float]:
    """Of each path: the chance of its last token if those before it stand."""
    assert len(proposal.chances) == len(proposal.tokens), "this method gave no chances"
    tree = proposal.tree
    chances = proposal.chances
    return {
        tuple([tree.tokens[at] for at in nodes]): chances[nodes[-1]] / (chances[nodes[-2]] if len(nodes) > 1 else 1.0)
        for nodes in tree.paths
    }
