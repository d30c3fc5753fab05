"""Messages in shared memory arrive whole, whatever their sizes."""

import os

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.shared_memory import SPACE, MessageMemory, new_memory


@given(st.lists(st.integers(0, 4 * SPACE), max_size=6), st.integers(1, 3))
def test_every_reader_gets_messages_of_any_size(sizes, readers):
    descriptor = new_memory()
    mappings = [MessageMemory(os.dup(descriptor)) for _ in range(readers)]
    writer = MessageMemory(descriptor)
    for number, size in enumerate(sizes):
        message = bytes([number + 1]) * size
        notice = writer.write(message)
        assert [mapping.read(notice) == message for mapping in mappings] == [True] * readers


def test_a_process_holds_no_descriptor_of_its_own_memory():
    before = len(os.listdir("/proc/self/fd"))
    memory = MessageMemory(new_memory())
    memory.read(memory.write(b"a message"))
    del memory
    assert len(os.listdir("/proc/self/fd")) == before
