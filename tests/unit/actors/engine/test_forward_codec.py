"""The arguments of a forward survive their encoding."""

from hypothesis import given
from hypothesis import strategies as st

from actors.compute.kv_cache import InputRow
from actors.engine.forward_codec import decode_forward, encode_forward
from actors.sampling.draws import Draws
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
draw = st.tuples(ids, st.integers(-(2**63), 2**63 - 1), st.floats(0, exclude_min=True, allow_infinity=False))


@st.composite
def draws(choose: st.DrawFn) -> Draws:
    drawn = choose(st.lists(draw, max_size=4))
    sampled, keys, temperatures = (tuple(one[field] for one in drawn) for field in range(3))
    return Draws(sampled, keys, temperatures, choose(st.booleans()))


@given(st.lists(rows, max_size=5), copied, moved, draws())
def test_a_forward_round_trips(step, copies, moves, drawn):
    assert decode_forward(encode_forward(step, copies, moves, drawn)) == (step, copies, moves, drawn)
