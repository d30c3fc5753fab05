"""Backs a process's memory with transparent huge pages of the Linux kernel.

A forward pass on a CPU reads all weights. With 4 KiB pages, part of its time goes to address translation.
"""

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

log = logging.getLogger(__name__)

MAPS = Path("/proc/self/maps")
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")  # absent without kernel support
COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), since Linux 6.1
MIN_USED = 7 / 8  # minimum share of a huge page in use; its unused rest is allocated, too
ANONYMOUS = ("", "[heap]")  # names of anonymous mappings


def use_huge_pages(huge_page_size: Path = HUGE_PAGE_SIZE) -> None:
    """Backs densely used memory, such as loaded weights, with huge pages. Takes 1 to 3 s per GB.

    Leaves unused memory, such as an empty cache, unallocated. No effect before Linux 6.1 or on other systems.
    """
    if not huge_page_size.is_file():
        return
    began = time.monotonic()
    size = int(huge_page_size.read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    moved = 0
    fault = ""
    for begin, end in _anonymous_ranges(size):
        for first, last in _dense_ranges(libc, begin, end, size):
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE) == 0:
                moved += last - first
            else:
                fault = f"; the rest stays in small pages: {os.strerror(ctypes.get_errno())}"
    log.info("moved %d MiB to huge pages in %.1f s%s", moved >> 20, time.monotonic() - began, fault)


def _anonymous_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Yields address ranges of private anonymous memory, aligned to `size`."""
    for line in MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or "".join(name) not in ANONYMOUS:
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // size) * size, end // size * size
        if begin < end:
            yield begin, end


def _dense_ranges(libc: ctypes.CDLL, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the longest ranges of huge pages that are each at least MIN_USED in use."""
    pages = size // mmap.PAGESIZE
    in_use = ctypes.create_string_buffer((end - begin) // mmap.PAGESIZE)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), in_use) != 0:
        return  # another thread has freed the mapping
    used = bytes(in_use)
    states = [pages - used.count(0, at, at + pages) >= MIN_USED * pages for at in range(0, len(used), pages)]
    at = begin
    for is_filled, run in groupby(states):
        length = len(list(run)) * size
        if is_filled:
            yield at, at + length
        at += length
