"""Selects draft-tree nodes by probability: enumerates verdict outcomes, grows trees, and merges two trees.

An outcome is a possible sequence of committed tokens: an accepted part of the block followed by one other token.

A node's probability is the probability of its path, so the likeliest nodes form a tree. For every n, the n likeliest
nodes are the best tree of n nodes (EAGLE-2: Li et al. 2024, arXiv 2406.16858).

`merged` merges the blocks of two methods. It assumes independent errors: a token proposed by both with probabilities a
and b has probability 1 - (1 - a)(1 - b). Probabilities that sum to more than 1 at a position are scaled down. Pure.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from cluster.drafting.requests import Proposal
from protos.draft_tree import DraftTree
from protos.frozen import value


@value
class Choices:
    """Candidate tokens at a position with the draft model's probabilities; likeliest first."""

    tokens: Sequence[int]
    chances: Sequence[float]

    def chance_of(self, token: int) -> float:
        """Returns the token's probability; 0 if it is not among the choices."""
        return self.chances[self.tokens.index(token)] if token in self.tokens else 0.0

    def including(self, token: int, chance: float) -> "Choices":
        """Returns the choices with `token` added; `chance` comes from another source."""
        if token in self.tokens or not chance:
            return self
        return Choices((*self.tokens, token), (*self.chances, chance))

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.tokens, self.chances, strict=True)


NO_CHOICES = Choices((), ())

Outcome = tuple[tuple[int, ...], float]  # (verdict tokens, probability)


def accepted_chance(block: Sequence[int], choices: Sequence[Choices]) -> float:
    """Returns the acceptance probability of the whole block.

    `choices` contains the choices at the block's positions. Ignores positions beyond the end of `choices`; an empty
    entry makes the result 0.
    """
    return math.prod(there.chance_of(token) for token, there in zip(block, choices, strict=False))


def rejections(block: DraftTree, choices: Sequence[Choices]) -> list[Outcome]:
    """Returns the outcomes that reject a token of the main path; `choices` are the candidates at its positions.

    The last token of each outcome is not in the block at that position.
    """
    outcomes = []
    reached = 1.0
    main_path = block.main_path
    parents = (-1, *block.along(main_path))
    for position, (drafted, there) in enumerate(zip(main_path, choices, strict=False)):
        accepted = main_path[:position]
        expected = block.children(parents[position])
        outcomes += [((*accepted, token), reached * chance) for token, chance in there if token not in expected]
        reached *= there.chance_of(drafted)
    return outcomes


def continuations(block: Sequence[int], accepted: float, after: Choices) -> list[Outcome]:
    """Returns the outcomes that accept the whole block, given its probability and the candidates after it."""
    return [((*block, token), accepted * chance) for token, chance in after]


CHILD_CHANCE = 0.5  # approximate probability of the token after a likely token
MAX_BRANCHES = 3  # maximum number of branches started before the main path is complete
MAX_SIBLINGS = 4  # choices per position; the fourth is the target's token at only 2 % of positions

TokenPath = tuple[int, ...]


@value
class Branch:
    """A branch of a growing tree: tokens after the path `stem`, which has probability `chance`.

    `choices[i]` contains the candidates at the position of `tokens[i]`.
    """

    stem: TokenPath
    chance: float
    tokens: TokenPath
    choices: Sequence[Choices]


def tree_of(paths: Sequence[tuple[TokenPath, float]]) -> DraftTree:
    """Returns the tree with these paths as nodes, in the same order; parents must precede their children."""
    nodes = {path: node for node, (path, _) in enumerate(paths)} | {(): -1}
    return DraftTree(tuple([path[-1] for path, _ in paths]), tuple([nodes[path[:-1]] for path, _ in paths]))


def likeliest_paths(branches: Iterable[Branch], most: int, least_chance: float) -> list[tuple[TokenPath, float]]:
    """Returns up to `most` paths with their probabilities, likeliest first."""
    chances: dict[TokenPath, float] = {}
    for branch in branches:
        path = branch.stem
        reached = branch.chance
        for token, there in zip(branch.tokens, branch.choices, strict=True):
            for other, chance in zip(there.tokens[:MAX_SIBLINGS], there.chances, strict=False):
                chances[(*path, other)] = reached * chance
            reached = chances.setdefault((*path, token), reached * there.chance_of(token))
            path = (*path, token)
    return likeliest_of(chances, most, least_chance)


def likeliest_of(chances: Mapping[TokenPath, float], most: int, least_chance: float) -> list[tuple[TokenPath, float]]:
    """Selects the likeliest paths; a path must not be likelier than its parent."""
    ranked = sorted(chances.items(), key=lambda node: (-node[1], len(node[0])))[:most]
    return [node for rank, node in enumerate(ranked) if rank == 0 or node[1] >= least_chance]


def grown_paths(after: Callable[[TokenPath], Choices], most: int, least_chance: float) -> list[tuple[TokenPath, float]]:
    """Returns the likeliest paths if continuations of any path are known without a forward pass.

    All returned paths have a probability of at least `least_chance`. Paths are expanded in order of probability, so
    `after` is called at most `most` times, and for a path only after its prefixes.
    """
    paths: list[tuple[TokenPath, float]] = []
    frontier: list[tuple[float, int, TokenPath]] = []  # (negated probability, depth, path)
    path: TokenPath = ()
    reached = 1.0
    while len(paths) < most:
        there = after(path)
        for token, chance in zip(there.tokens[:MAX_SIBLINGS], there.chances, strict=False):
            if reached * chance >= least_chance:
                heappush(frontier, (-reached * chance, len(path) + 1, (*path, token)))
        if not frontier:
            break
        below, _, path = heappop(frontier)
        reached = -below
        paths.append((path, reached))
    return paths


def grow_branches(after: Callable[[TokenPath], Choices], most: int, least_chance: float) -> list[Branch]:
    """Returns the result of `grown_paths` as branches, one per expanded path.

    Always keeps the first branch, even if its tokens are unlikely.
    """
    choices: dict[TokenPath, Choices] = {}

    def expand(path: TokenPath) -> Choices:
        choices[path] = after(path)
        return choices[path]

    chances = {(): 1.0, **dict(grown_paths(expand, most, least_chance))}
    return [
        Branch(path, chances[path], tuple(there.tokens[:1]), (there,))
        for path, there in choices.items()
        if there.tokens
    ]


def branches_by_depth(choices: Sequence[Choices], most: int, least_chance: float) -> list[Branch]:
    """Returns the branches of a block whose choices depend only on the position, not on earlier tokens."""
    return grow_branches(
        lambda path: choices[len(path)] if len(path) < len(choices) else NO_CHOICES, most, least_chance
    )


def threshold_of(paths: Sequence[tuple[TokenPath, float]], most: int) -> float:
    """Returns the minimum probability for a new node among the likeliest `most`; 0 while there are fewer paths."""
    return paths[-1][1] if len(paths) == most else 0.0


def worth_branching(
    paths: Sequence[tuple[TokenPath, float]], main_path: TokenPath, least: float, most: int = MAX_BRANCHES
) -> list[tuple[TokenPath, float]]:
    """Returns up to `most` paths that leave the main path at their last token and may have children of probability
    `least`.
    """
    return [
        (path, chance)
        for path, chance in paths
        if chance * CHILD_CHANCE > least and path[:-1] == main_path[: len(path) - 1] and path != main_path[: len(path)]
    ][:most]


def merged(one: Proposal, other: Proposal, most: int, least_chance: float) -> Proposal:
    """Merges two blocks for the same prefix into up to `most` nodes, likeliest first.

    Always keeps the first node, even below `least_chance`.
    """
    assert (one.base_len, one.prefix_hash) == (other.base_len, other.prefix_hash), "prefixes differ"
    if not (one.tokens and other.tokens):
        return one if one.tokens else other
    paths = likeliest_of(combined(_probabilities_by_path(one), _probabilities_by_path(other)), most, least_chance)
    tree = tree_of(paths)
    judged = next((each for each in (one, other) if each.confidence is not None), other)
    return replace(
        judged,
        tree=tree,
        confidence=judged.confidence if judged.tokens[0] == tree.tokens[0] else None,
        chances=tuple([chance for _, chance in paths]),
        chance=max(one.chance, other.chance),
    )


def combined(one: Mapping[TokenPath, float], other: Mapping[TokenPath, float]) -> dict[TokenPath, float]:
    """Combines the conditional probabilities of two methods into cumulative path probabilities.

    The inputs map each path to the conditional probability of its last token.
    """
    given = {path: 1 - (1 - one.get(path, 0.0)) * (1 - other.get(path, 0.0)) for path in {**one, **other}}
    totals: defaultdict[TokenPath, float] = defaultdict(float)  # sum over the tokens after each path
    for path, chance in given.items():
        totals[path[:-1]] += chance
    reached: dict[TokenPath, float] = {(): 1.0}
    for path in sorted(given, key=len):
        before = path[:-1]
        reached[path] = reached[before] * given[path] / max(1.0, totals[before])
    del reached[()]
    return reached


def _probabilities_by_path(proposal: Proposal) -> dict[TokenPath, float]:
    """Returns the conditional probability of each path's last token."""
    assert len(proposal.chances) == len(proposal.tokens), "the proposal has no probabilities"
    tree = proposal.tree
    chances = proposal.chances
    return {
        tuple([tree.tokens[at] for at in nodes]): chances[nodes[-1]] / (chances[nodes[-2]] if len(nodes) > 1 else 1.0)
        for nodes in tree.paths
    }
