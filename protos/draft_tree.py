"""Draft tree: a block of candidate tokens; a chain is the simplest tree."""

from collections.abc import Sequence

from protos.frozen import value

MAX_BLOCK_TOKENS = 128


@value
class SparseProbs:
    """Truncated draft probabilities, (positions, width): each weight divided by the sum of its row."""

    token_ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.token_ids)


_CHAIN = tuple(range(-1, MAX_BLOCK_TOKENS - 1))


@value
class DraftTree:
    """A tree of candidate tokens: node i has token `tokens[i]` and parent `parents[i]`; parent -1 is the prefix.

    Parents precede their children, and siblings have distinct tokens. The parents of a chain are -1, 0, 1, and so on.
    Only a chain may have `probs`, the distributions used to draw its tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: SparseProbs | None = None

    @classmethod
    def chain(cls, tokens: tuple[int, ...], probs: SparseProbs | None = None) -> "DraftTree":
        """Returns a tree in which each token follows the previous one."""
        return cls(tokens, _CHAIN[: len(tokens)], probs)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == _CHAIN[: len(self.parents)]

    @property
    def depths(self) -> list[int]:
        """Depth of each node; children of the prefix have depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Path to each node: its ancestors, root first, then the node itself."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*paths[parent], node) if parent >= 0 else (node,))
        return paths

    @property
    def main_path(self) -> tuple[int, ...]:
        """Tokens of the main path, which follows the first (likeliest) child of each node."""
        if self.is_chain:
            return self.tokens
        nodes: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if parent == last:
                nodes.append(self.tokens[node])
                last = node
        return tuple(nodes)

    @property
    def off_main_path(self) -> list[tuple[int, ...]]:
        """Token paths that branch off the main path at their last token."""
        main_path = self.main_path
        parents = (-1, *self.along(main_path))
        return [
            (*main_path[:depth], token)
            for depth, parent in enumerate(parents)
            for token in self.children(parent)
            if (*main_path[:depth], token) != main_path[: depth + 1]
        ]

    def children(self, parent: int) -> tuple[int, ...]:
        """Returns the tokens of a node's children; -1 stands for the prefix."""
        return tuple([token for token, at in zip(self.tokens, self.parents, strict=True) if at == parent])

    def within(self, depth: int) -> "DraftTree":
        """Returns the subtree of nodes whose depth is less than `depth`."""
        if self.is_chain:
            return self.first(depth)
        nodes = [node for node, at in enumerate(self.depths) if at < depth]
        new_index = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        tokens = tuple([self.tokens[node] for node in nodes])
        return DraftTree(tokens, tuple([new_index[self.parents[node]] for node in nodes]))

    @property
    def depth(self) -> int:
        """Number of nodes on the longest root-to-leaf path."""
        return len(self.tokens) if self.is_chain else 1 + max(self.depths)

    def first(self, count: int) -> "DraftTree":
        """Returns the subtree of the first `count` nodes."""
        if count >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:count], self.parents[:count], _part(self.probs, slice(count)))

    def along(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the nodes that match `tokens` from the root, up to the first mismatch."""
        nodes: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if len(nodes) == len(tokens):
                break
            if parent == last and self.tokens[node] == tokens[len(nodes)]:
                nodes.append(node)
                last = node
        return tuple(nodes)

    def after(self, tokens: Sequence[int]) -> "DraftTree":
        """Returns the subtree below the path `tokens`; empty if the tree lacks that path."""
        path = self.along(tokens)
        if len(path) < len(tokens):
            return NO_TREE
        if not path:
            return self
        new_index = {path[-1]: -1}  # new index of each kept node
        for node, parent in enumerate(self.parents):
            if parent in new_index and node not in new_index:
                new_index[node] = len(new_index) - 1
        nodes = [node for node, index in new_index.items() if index >= 0]
        probs = _part(self.probs, slice(len(path), None))
        tokens_kept = tuple([self.tokens[node] for node in nodes])
        return DraftTree(tokens_kept, tuple([new_index[self.parents[node]] for node in nodes]), probs)


def _part(probs: SparseProbs | None, part: slice) -> SparseProbs | None:
    return SparseProbs(probs.token_ids[part], probs.weights[part]) if probs is not None else None


NO_TREE = DraftTree((), ())
