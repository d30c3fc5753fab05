"""A step's arrays equal its rows' own properties, concatenated."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.attention.flat_rows import WORD, WORDS, FlatRows, padded
from actors.compute.input_row import InputRow, PageTable
from tests.unit.trees import grown

PAGE_SIZE = 4


def a_row(rng: Random) -> InputRow:
    """Returns a chain or tree after some tokens, whose page table may end beyond the row."""
    tree = grown(rng, rng.randint(1, 100), 500)
    nodes = tree.tokens if rng.random() < 0.6 else ()
    parents = () if not nodes or tree.is_chain else tree.parents
    tokens = (*[rng.randrange(500) for _ in range(rng.randint(1, 5))], *nodes)
    start = rng.randint(0, 40)
    pages = [rng.randrange(900) for _ in range(-(-(start + len(tokens)) // PAGE_SIZE) + rng.randint(0, 2))]
    return InputRow(tokens, start, rng.randint(0, len(tokens)), rng.choice([tuple, PageTable])(pages), parents)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 6))
def test_arrays_concatenate_what_rows_define(seed, count):
    rng = Random(seed)
    rows = [a_row(rng) for _ in range(count)]
    flat = FlatRows(rows, PAGE_SIZE)
    assert flat.tokens.tolist() == [token for row in rows for token in row.tokens]
    assert flat.positions.tolist() == [at for row in rows for at in row.positions]
    assert flat.slots.tolist() == [at for row in rows for at in row.slots]
    assert flat.prefixes.tolist() == [at + 1 for row in rows for at in row.seen]
    assert flat.written.tolist() == [
        row.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for row in rows for at in row.slots
    ]
    for row, table in zip(rows, flat.tables, strict=True):
        used = -(-row.end // PAGE_SIZE)
        assert table[:used].tolist() == list(row.pages[:used])
        assert not table[used:].any()
    paths = [path for row in rows for path in ([()] * (len(row.tokens) - len(row.parents)) + row.tree.paths)]
    for words, path in zip(flat.ancestors.tolist(), paths, strict=True):
        bits = [word * WORD + bit for word in range(WORDS) for bit in range(WORD) if words[word] >> bit & 1]
        assert bits == list(path)
    ends = np.cumsum([len(row.tokens) for row in rows]).tolist()
    logit_at = [at for row, end in zip(rows, ends, strict=True) for at in range(end - row.logits, end)]
    assert flat.logit_at.tolist() == logit_at
    assert flat.starts.tolist() == [0, *ends]
    firsts = np.cumsum([0, *[row.logits for row in rows]]).tolist()
    assert flat.parents.tolist() == [
        first + parent for row, first in zip(rows, firsts, strict=False) for parent in parents_of(row)
    ]
    assert flat.longest == max((row.logits for row in rows), default=0)


def parents_of(row: InputRow) -> list[int]:
    """Returns the parents of a row's positions with logits, counted from the first one."""
    root = row.logits - len(row.parents) - 1
    if not row.parents or root < 0:
        return [max(0, at - 1) for at in range(row.logits)]
    return [*[max(0, at - 1) for at in range(root + 1)], *[root + 1 + parent for parent in row.parents]]


def test_a_page_table_grows_and_is_replaced_from_any_page_on():
    table = PageTable((7, 2, 9))
    assert table.numbers.tolist() == [7, 2, 9]
    grown_table = table.replace_from(3, [4]).replace_from(1, [5, 6])
    assert grown_table == (7, 5, 6)
    assert grown_table.numbers.tolist() == [7, 5, 6]
    assert PageTable.of(np.array([3, 1])) == (3, 1)


def test_padding_must_hold_the_numbers():
    assert padded(np.array([3, 4]), 4, 9).tolist() == [3, 4, 9, 9]
    with pytest.raises(AssertionError, match="more"):
        padded(np.array([3, 4]), 1)
