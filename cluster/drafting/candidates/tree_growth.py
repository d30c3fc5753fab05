"""Selection of a draft model's candidate tokens for a block: the likeliest paths under a budget of nodes.

(EAGLE-2: Li et al. 2024, arXiv 2406.16858.) A node's probability is that of its path, so the likeliest nodes form a
tree. In falling order of probability, the first n nodes are the best tree of n nodes, for every n. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from cluster.drafting.candidates.outcomes import NOTHING, Choices
from protos.draft_tree import DraftTree
from protos.frozen import value

HOPE = 0.5  # approximate probability of the token after a likely one
LIMBS = 3  # branches of a block that are begun at once
SIBLINGS = 4  # choices considered at a position: even the fourth is the target's token at only 2 of 100 positions

Path = tuple[int, ...]


@value
class Limb:
    """A branch of a growing tree: the tokens after the path `stem`, which has the probability `chance`.

    Each of `tokens` was chosen from the entry of `choices` at its place.
    """

    stem: Path
    chance: float
    tokens: Path
    choices: Sequence[Choices]


def likeliest_tree(limbs: Iterable[Limb], most: int, least_chance: float) -> DraftTree:
    """Returns a tree of at most `most` nodes, likeliest first; the first is kept even if it is below `least_chance`."""
    return tree_of(likeliest_paths(limbs, most, least_chance))


def tree_of(paths: Sequence[tuple[Path, float]]) -> DraftTree:
    """Returns the tree with these paths as its nodes, in this order; each path must come after its parent."""
    places = {path: node for node, (path, _) in enumerate(paths)} | {(): -1}
    return DraftTree(tuple([path[-1] for path, _ in paths]), tuple([places[path[:-1]] for path, _ in paths]))


def likeliest_paths(limbs: Iterable[Limb], most: int, least_chance: float) -> list[tuple[Path, float]]:
    """Returns at most `most` paths with their probabilities, in falling order."""
    chances: dict[Path, float] = {}
    for limb in limbs:
        path = limb.stem
        reached = limb.chance
        for token, there in zip(limb.tokens, limb.choices, strict=True):
            for other, chance in zip(there.tokens[:SIBLINGS], there.chances, strict=False):
                chances[(*path, other)] = reached * chance
            reached = chances.setdefault((*path, token), reached * there.chance_of(token))
            path = (*path, token)
    return likeliest_of(chances, most, least_chance)


def likeliest_of(chances: Mapping[Path, float], most: int, least_chance: float) -> list[tuple[Path, float]]:
    """Selects the likeliest paths; no path may be likelier than its parent."""
    ranked = sorted(chances.items(), key=lambda node: (-node[1], len(node[0])))[:most]
    return [node for rank, node in enumerate(ranked) if rank == 0 or node[1] >= least_chance]


def grown_paths(after: Callable[[Path], Choices], most: int, least_chance: float) -> list[tuple[Path, float]]:
    """Returns the likeliest paths when the continuations of any path are known without a forward pass.

    None is below `least_chance`. The likeliest path is expanded first, so `after` is called at most `most` times, and
    for a path only after all of its prefixes.
    """
    found: list[tuple[Path, float]] = []
    ahead: list[tuple[float, int, Path]] = []  # negated probability, depth, path
    path: Path = ()
    reached = 1.0
    while len(found) < most:
        there = after(path)
        for token, chance in zip(there.tokens[:SIBLINGS], there.chances, strict=False):
            if reached * chance >= least_chance:
                heappush(ahead, (-reached * chance, len(path) + 1, (*path, token)))
        if not ahead:
            break
        below, _, path = heappop(ahead)
        reached = -below
        found.append((path, reached))
    return found


def grow_limbs(after: Callable[[Path], Choices], most: int, least_chance: float) -> list[Limb]:
    """Returns the result of `grown_paths` as limbs, each with the possible tokens after one path.

    The first limb is there however unlikely its tokens are.
    """
    known: dict[Path, Choices] = {}

    def noted(path: Path) -> Choices:
        known[path] = after(path)
        return known[path]

    chances = {(): 1.0, **dict(grown_paths(noted, most, least_chance))}
    return [
        Limb(path, chances[path], tuple(there.tokens[:1]), (there,)) for path, there in known.items() if there.tokens
    ]


def limbs_by_depth(choices: Sequence[Choices], most: int, least_chance: float) -> list[Limb]:
    """Returns the limbs of a block in which the choices at a position do not depend on the tokens before it."""
    return grow_limbs(lambda path: choices[len(path)] if len(path) < len(choices) else NOTHING, most, least_chance)


def least_of(paths: Sequence[tuple[Path, float]], most: int) -> float:
    """Returns the probability that a further node needs to be among the likeliest `most`; 0 while fewer are there."""
    return paths[-1][1] if len(paths) == most else 0.0


def worth_a_limb(paths: Sequence[tuple[Path, float]], trunk: Path, least: float) -> list[tuple[Path, float]]:
    """Returns the paths that leave the main path with their last node and whose children may reach `least`."""
    return [
        (path, chance)
        for path, chance in paths
        if chance * HOPE > least and path[:-1] == trunk[: len(path) - 1] and path != trunk[: len(path)]
    ][:LIMBS]
