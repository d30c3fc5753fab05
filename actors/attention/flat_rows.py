"""Flattens a step's rows into arrays with one entry per token of all rows.

The arrays of chains follow from each row's start and length, so no operation runs per token. Rows with trees are
computed one at a time.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from actors.compute.input_row import InputRow, Integers, page_numbers
from protos.draft_tree import MAX_BLOCK_TOKENS

WORD = 64  # nodes per word of ancestor bits
WORDS = -(-MAX_BLOCK_TOKENS // WORD)


class FlatRows:
    """Tokens, slots and attended slots of a step's rows, as int64 arrays, each (tokens,) unless stated otherwise."""

    def __init__(self, rows: Sequence[InputRow], page_size: int) -> None:
        lengths = [len(row.tokens) for row in rows]
        counts = np.array(lengths, np.int64)
        # (rows + 1,): first token of each row, then the number of tokens
        self.starts = np.array([0, *accumulate(lengths)], np.int64)
        self.tokens = np.array([*chain.from_iterable([row.tokens for row in rows])], np.int64)
        index = np.arange(len(self))
        first_slots = np.array([row.start for row in rows], np.int64)
        self.slots = index + (first_slots - self.starts[:-1]).repeat(counts)
        self.positions = self.slots
        self.prefixes = self.slots + 1  # number of leading slots that a token attends to, all of them
        self.ancestors = np.zeros((len(self), WORDS), np.int64)  # bits of further slots, as in `StepTensors`
        self._add_trees(rows)
        used = [-(-row.end // page_size) for row in rows]
        self.tables = np.zeros((len(rows), max(used, default=0)), np.int64)  # page table of each row, then zeros
        for table, row, pages in zip(self.tables, rows, used, strict=True):
            table[:pages] = page_numbers(row.pages)[:pages]
        page, offset = np.divmod(self.slots, page_size)
        row_of = np.arange(len(rows)).repeat(counts)
        self.written = self.tables[row_of, page] * page_size + offset
        self.logit_at = index  # (positions with logits,)
        logits = [row.logits for row in rows]
        if logits != lengths:
            self.logit_at = index[index >= (self.starts[1:] - np.array(logits, np.int64)).repeat(counts)]
        self.longest = max(logits, default=0)  # maximum number of positions with logits per row
        self.parents = self._parents(rows, logits)  # (positions with logits,)

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return int(self.starts[-1])

    def _parents(self, rows: Sequence[InputRow], logits: Sequence[int]) -> Integers:
        """Returns the parent of each position with logits: the index of the position before it in its chain or tree.

        A row's first position is its own parent.
        """
        parents = np.arange(-1, len(self.logit_at) - 1)
        ends = [*accumulate(logits, initial=0)]
        firsts = [begin for begin, end in pairwise(ends) if begin < end]
        parents[firsts] = firsts
        for row, (begin, end) in zip(rows, pairwise(ends), strict=True):
            if row.parents and len(row.parents) < end - begin:
                root = end - len(row.parents)  # the first node; its parent is the position before it
                parents[root:end] = np.array(row.parents) + root
        return parents

    def _add_trees(self, rows: Sequence[InputRow]) -> None:
        trees = [index for index, row in enumerate(rows) if row.parents]
        if trees:
            self.positions = self.slots.copy()
        for index in trees:
            row = rows[index]
            begin, end = self.starts[index : index + 2].tolist()
            self.positions[begin:end] = row.positions
            self.prefixes[begin:end] = [at + 1 for at in row.seen]
            self.ancestors[end - len(row.parents) : end] = [_words(path) for path in row.tree.paths]


def padded(numbers: Integers, count: int, padding: int = 0) -> Integers:
    """Returns the numbers, followed by padding to `count`."""
    assert len(numbers) <= count, f"{len(numbers)} numbers are more than {count}"
    result = np.zeros(count, np.int64)
    result[: len(numbers)] = numbers
    if padding:  # zeros are already there
        result[len(numbers) :] = padding
    return result


def _words(path: Sequence[int]) -> list[int]:
    """Returns the nodes on a path as the bits of WORDS signed words."""
    bits = sum(1 << node for node in path)
    words = [(bits >> (WORD * word)) & ((1 << WORD) - 1) for word in range(WORDS)]
    return [word - (word >> (WORD - 1) << WORD) for word in words]
