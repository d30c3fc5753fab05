"""Followers decode exactly what the leader sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.compute.kv_cache import InputRow
from actors.engine.tensor_parallel import STEP_NUMBERS, from_tensor, receive_step, send_step, to_tensor
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
CPU = torch.device("cpu")


copied = st.lists(st.builds(PageCopy, ids, ids), max_size=4)
moved = st.lists(st.builds(SlotMove, ids, ids), max_size=4)


@given(st.lists(rows, max_size=5), copied, moved, st.integers(0, 9))
def test_a_step_survives_the_round_trip_whatever_follows_it(step, copies, moves, padding):
    tensor = to_tensor(step, copies, moves)
    assert tensor.dtype is torch.int32
    assert int(tensor[0]) == len(tensor)
    assert from_tensor(torch.cat([tensor, torch.full((padding,), 7, dtype=torch.int32)])) == (step, copies, moves)


class Wire:
    """A group of two, seen from both ends."""

    size = 2

    def __init__(self) -> None:
        self.rank = 0
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))  # fails unless the follower expects what the leader sends


@pytest.mark.parametrize("tokens", [3, STEP_NUMBERS - 11, STEP_NUMBERS - 10, STEP_NUMBERS - 9, 3 * STEP_NUMBERS])
def test_a_step_of_any_length_is_sent_whole_and_short_ones_in_one_message(tokens):
    """Shorter than a message, just one, one number more, and much longer."""
    wire = Wire()
    step = [InputRow(tuple(range(tokens)), 5, 1, (9,))]  # 10 numbers beside the tokens
    numbers = to_tensor(step, [])
    assert len(numbers) == tokens + 10
    send_step(numbers, wire, CPU)
    assert len(wire.sent) == (1 if tokens + 10 <= STEP_NUMBERS else 2)
    assert len(wire.sent[0]) == STEP_NUMBERS
    wire.rank = 1
    assert from_tensor(receive_step(wire, CPU)) == (step, [], [])
    assert not wire.sent
