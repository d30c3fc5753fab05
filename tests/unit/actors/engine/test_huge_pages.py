import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engine.huge_pages import HUGE_PAGE_SIZE, use_huge_pages

MIB = 1 << 20


def has_collapse() -> bool:
    """Returns whether the kernel supports MADV_COLLAPSE (Linux 6.1)."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return HUGE_PAGE_SIZE.is_file() and version is not None and tuple(map(int, version.groups())) >= (6, 1)


def mappings() -> Iterator[tuple[range, dict[str, int]]]:
    """Yields the address range and the memory statistics, in bytes, of each mapping of this process."""
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        begin, end = (int(part, 16) for part in block.split(maxsplit=1)[0].split("-"))
        yield range(begin, end), {name: 1024 * int(kib) for name, kib in re.findall(r"(?m)^(\w+): +(\d+) kB", block)}


def figures_of(tensor: Tensor) -> dict[str, int]:
    """Returns the memory statistics of the mapping that contains a tensor."""
    return next(figures for addresses, figures in mappings() if tensor.data_ptr() in addresses)


def resident() -> int:
    return sum(figures["Rss"] for _, figures in mappings())


@pytest.mark.skipif(not has_collapse(), reason="the kernel lacks MADV_COLLAPSE")
def test_used_memory_moves_unchanged_and_unused_memory_stays_unused():
    weights = torch.arange(8 * MIB)  # 64 MiB
    cache = torch.empty(512 * MIB, dtype=torch.uint8)
    before = resident()
    use_huge_pages()
    assert figures_of(weights)["AnonHugePages"] >= 56 * MIB
    assert weights.equal(torch.arange(8 * MIB))
    assert resident() - before < 256 * MIB, "the empty cache takes memory now"
    assert cache.fill_(1).all()


def test_without_kernel_support_nothing_happens(tmp_path: Path):
    weights = torch.ones(8 * MIB)
    use_huge_pages(tmp_path / "absent")
    assert weights.eq(1).all()
