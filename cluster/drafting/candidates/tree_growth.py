"""Which of the tokens that a draft model thought of make a block: the likeliest paths, under a budget.

(EAGLE-2: Li et al. 2024, arXiv 2406.16858.) A node's chance is that of its path, so the likeliest nodes are a tree; in
falling order of chance, any number of first nodes is the best tree of that size. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from cluster.drafting.candidates.outcomes import NOTHING, Choices
from protos.draft_tree import DraftTree
from protos.values import value

HOPE = 0.5  # chance of the token after a likely one, about
LIMBS = 3  # of a block, that are begun at once
SIBLINGS = 4  # choices of a place that are looked at: even the fourth is the target's token at 2 of 100 places only

Path = tuple[int, ...]


@value
class Limb:
    """A chain in a growing tree: `tokens`, each chosen from `choices`, after the path `stem`, which has a chance."""

    stem: Path
    chance: float
    tokens: Path
    choices: Sequence[Choices]


def likeliest_tree(limbs: Iterable[Limb], most: int, least_chance: float) -> DraftTree:
    """At most so many nodes, the likeliest first; the very first is there however unlikely it is."""
    return tree_of(likeliest_paths(limbs, most, least_chance))


def tree_of(paths: Sequence[tuple[Path, float]]) -> DraftTree:
    """Of which these are the nodes, in this order; each comes after the path that it goes on from."""
    places = {path: node for node, (path, _) in enumerate(paths)} | {(): -1}
    return DraftTree(tuple([path[-1] for path, _ in paths]), tuple([places[path[:-1]] for path, _ in paths]))


def likeliest_paths(limbs: Iterable[Limb], most: int, least_chance: float) -> list[tuple[Path, float]]:
    """With their chances, which fall."""
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
    """Of paths none of which is likelier than the one that it goes on from."""
    ranked = sorted(chances.items(), key=lambda node: (-node[1], len(node[0])))[:most]
    return [node for rank, node in enumerate(ranked) if rank == 0 or node[1] >= least_chance]


def grown_paths(after: Callable[[Path], Choices], most: int, least_chance: float) -> list[tuple[Path, float]]:
    """The likeliest paths, where what follows any path is known without a forward; none below `least_chance`.

    What follows is asked for the likeliest path first, so that `after` is called `most` times at most, and about a
    path after all of its beginnings.
    """
    found: list[tuple[Path, float]] = []
    ahead: list[tuple[float, int, Path]] = []  # the chance with its sign changed, depth, path
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
    """The same as limbs, which say of each path what may follow it; of the first one however unlikely that is."""
    known: dict[Path, Choices] = {}

    def noted(path: Path) -> Choices:
        known[path] = after(path)
        return known[path]

    chances = {(): 1.0, **dict(grown_paths(noted, most, least_chance))}
    return [
        Limb(path, chances[path], tuple(there.tokens[:1]), (there,)) for path, there in known.items() if there.tokens
    ]


def limbs_by_depth(choices: Sequence[Choices], most: int, least_chance: float) -> list[Limb]:
    """Limbs of a block whose places are as they are whatever tokens stand before them."""
    return grow_limbs(lambda path: choices[len(path)] if len(path) < len(choices) else NOTHING, most, least_chance)


def least_of(paths: Sequence[tuple[Path, float]], most: int) -> float:
    """The chance that a further node must have to be among the likeliest `most`; 0 while there is room."""
    return paths[-1][1] if len(paths) == most else 0.0


def worth_a_limb(paths: Sequence[tuple[Path, float]], trunk: Path, least: float) -> list[tuple[Path, float]]:
    """Paths that leave the trunk with their last node, where what follows may well have at least such a chance."""
    return [
        (path, chance)
        for path, chance in paths
        if chance * HOPE > least and path[:-1] == trunk[: len(path) - 1] and path != trunk[: len(path)]
    ][:LIMBS]
