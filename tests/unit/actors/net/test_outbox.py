"""Queued messages of a peer: how many form a frame, and when a peer is too far behind."""

import asyncio

import pytest

from actors.net import streams
from actors.net.streams import MOST_MESSAGES, Outbox, StatesOutbox
from cluster.errors import ProtocolError
from protos.messages import MAX_STATES_BYTES, Close, Message, StateDtype, States, Verdict

HALF = States("s", 0, 0, StateDtype.BFLOAT16, 8, bytes(MAX_STATES_BYTES // 2))


async def frames(outbox: Outbox, count: int) -> list[list[Message]]:
    return [await outbox.take() for _ in range(count)]


async def test_a_frame_of_states_is_small_so_that_other_streams_get_their_turn():
    """Two halves and what is around them are more than a frame."""
    outbox = StatesOutbox()
    for _ in range(3):
        outbox.put(HALF)
    assert [len(frame) for frame in await frames(outbox, 3)] == [1, 1, 1]
    small = States("s", 0, 0, StateDtype.BFLOAT16, 8, bytes(16))
    for _ in range(3):
        outbox.put(small)
    assert [len(frame) for frame in await frames(outbox, 1)] == [3]


async def test_a_drafter_that_takes_no_states_loses_its_stream_and_not_the_targets_memory(monkeypatch):
    monkeypatch.setattr(streams, "STATES_OUTBOX_BYTES", 2 << 20)
    outbox = StatesOutbox()
    for _ in range(3):
        outbox.put(HALF)
    await frames(outbox, 3)
    for _ in range(100):
        outbox.put(HALF)
    with pytest.raises(ProtocolError):
        await asyncio.wait_for(outbox.overflow(), 10)
    assert sum(len(message.rows) for message in outbox._due if isinstance(message, States)) <= 2 << 20


async def test_other_outboxes_are_bounded_by_messages_as_before():
    outbox = Outbox(limit=2)
    for _ in range(3):
        outbox.put(Verdict("s", 1, 1, 0, (1,), 0, 0))
    with pytest.raises(ProtocolError, match="2 messages behind"):
        await asyncio.wait_for(outbox.overflow(), 10)


async def test_a_frame_holds_no_more_messages_than_are_taken_at_once():
    outbox = Outbox()
    for number in range(MOST_MESSAGES + 1):
        outbox.put(Close(str(number), 1))
    assert [len(await outbox.take()), len(await outbox.take())] == [MOST_MESSAGES, 1]
