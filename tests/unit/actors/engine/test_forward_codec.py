"""The arguments of a forward survive their encoding."""

from hypothesis import given
from hypothesis import strategies as st

from actors.compute.kv_cache import InputRow
from actors.engine.forward_codec import decode_forward, encode_forward
from cluster.page_allocator import PageCopy, SlotMove

ids = st.integers(0, 2**31 - 1)
tuples = st.lists(ids, max_size=6).map(tuple)
rows = st.builds(
    InputRow,
    tokens=tuples,
    start=ids,
    logits=ids,
    pages=tuples,
    parents=st.lists(st.integers(-1, 127), max_size=6).map(tuple),
)
copied = st.lists(st.builds(PageCopy, ids, ids), max_size=4)
moved = st.lists(st.builds(SlotMove, ids, ids), max_size=4)


@given(st.lists(rows, max_size=5), copied, moved)
def test_a_forward_round_trips(step, copies, moves):
    assert decode_forward(encode_forward(step, copies, moves)) == (step, copies, moves)
