"""Shared memory that holds one message at a time."""

import mmap
import os
import struct

NOTICE = struct.Struct("!I")  # size of the message, in bytes
SPACE = 1 << 20  # initial size in bytes; pages that were never written take no memory


def new_memory() -> int:
    """Creates shared memory without a name, which vanishes with its last process; returns its file descriptor."""
    memory = os.memfd_create("slipstream")
    os.ftruncate(memory, SPACE)
    return memory


class MessageMemory:
    """One message at a time, from one writer to its readers, each with a mapping of the same memory.

    The writer sends the notice to the readers by other means, and waits for them before it writes again. Every reader
    must read every message, because reader and writer enlarge their mappings by the same messages.
    """

    def __init__(self, memory: int) -> None:
        """Maps shared memory and closes its descriptor."""
        self._mapping = mmap.mmap(memory, 0)
        os.close(memory)

    def write(self, message: bytes) -> bytes:
        """Replaces the message; returns the notice of the new one."""
        size = len(message)
        self._reserve(size)
        self._mapping[:size] = message
        return NOTICE.pack(size)

    def read(self, notice: bytes) -> bytes:
        """Returns the message that belongs to a notice."""
        (size,) = NOTICE.unpack(notice)
        self._reserve(size)
        return self._mapping[:size]

    def _reserve(self, size: int) -> None:
        if size > len(self._mapping):
            self._mapping.resize(2 * size)  # equal in all processes, since it also sets the size of the memory
