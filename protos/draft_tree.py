"""What a drafter proposes: a tree of candidate tokens, of which a chain is the plain case."""

from collections.abc import Sequence

from protos.values import value

MAX_BLOCK_TOKENS = 128


@value
class SparseProbs:
    """Truncated draft probabilities, positions x width; a probability is weight / sum of its row's weights."""

    token_ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.token_ids)


_CHAIN = tuple(range(-1, MAX_BLOCK_TOKENS - 1))


@value
class DraftTree:
    """Candidate tokens: node i is `tokens[i]`, to come after node `parents[i]`, or after the prefix for -1.

    Parents come before their children, and no two children of one node have the same token. A chain has the parents
    -1, 0, 1, ...; only a chain has `probs`, which its tokens were drawn from.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: SparseProbs | None = None

    @classmethod
    def chain(cls, tokens: tuple[int, ...], probs: SparseProbs | None = None) -> "DraftTree":
        """Tokens that follow one another."""
        return cls(tokens, _CHAIN[: len(tokens)], probs)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == _CHAIN[: len(self.parents)]

    @property
    def depths(self) -> list[int]:
        """Of each node: how many nodes it comes after."""
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 0)
        return found

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """To each node: the nodes that it comes after, in order, and itself."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            found.append((*found[parent], node) if parent >= 0 else (node,))
        return found

    @property
    def trunk(self) -> tuple[int, ...]:
        """Tokens of the path that takes every node's first child, which is the likeliest."""
        if self.is_chain:
            return self.tokens
        found: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if parent == last:
                found.append(self.tokens[node])
                last = node
        return tuple(found)

    @property
    def off_trunk(self) -> list[tuple[int, ...]]:
        """Tokens of the paths that leave the trunk with their last node."""
        trunk = self.trunk
        parents = (-1, *self.along(trunk))
        return [
            (*trunk[:depth], token)
            for depth, parent in enumerate(parents)
            for token in self.children(parent)
            if (*trunk[:depth], token) != trunk[: depth + 1]
        ]

    def children(self, parent: int) -> tuple[int, ...]:
        """Tokens that come after a node, or after the prefix for -1."""
        return tuple([token for token, at in zip(self.tokens, self.parents, strict=True) if at == parent])

    def within(self, depth: int) -> "DraftTree":
        """The nodes that come after fewer than so many others."""
        if self.is_chain:
            return self.first(depth)
        kept = [node for node, at in enumerate(self.depths) if at < depth]
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        tokens = tuple([self.tokens[node] for node in kept])
        return DraftTree(tokens, tuple([places[self.parents[node]] for node in kept]))

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        return len(self.tokens) if self.is_chain else 1 + max(self.depths)

    def first(self, count: int) -> "DraftTree":
        """The first nodes, which are a tree too."""
        if count >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:count], self.parents[:count], _part(self.probs, slice(count)))

    def along(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The path of nodes that have these tokens one after the other, as far as there is one."""
        found: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if len(found) == len(tokens):
                break
            if parent == last and self.tokens[node] == tokens[len(found)]:
                found.append(node)
                last = node
        return tuple(found)

    def after(self, tokens: Sequence[int]) -> "DraftTree":
        """What comes after these tokens; nothing if they are not in the tree."""
        path = self.along(tokens)
        if len(path) < len(tokens):
            return NO_TREE
        if not path:
            return self
        places = {path[-1]: -1}  # of the nodes that stay, in the new tree
        for node, parent in enumerate(self.parents):
            if parent in places and node not in places:
                places[node] = len(places) - 1
        kept = [node for node, place in places.items() if place >= 0]
        probs = _part(self.probs, slice(len(path), None))
        tokens_kept = tuple([self.tokens[node] for node in kept])
        return DraftTree(tokens_kept, tuple([places[self.parents[node]] for node in kept]), probs)


def _part(probs: SparseProbs | None, part: slice) -> SparseProbs | None:
    return SparseProbs(probs.token_ids[part], probs.weights[part]) if probs is not None else None


NO_TREE = DraftTree((), ())
