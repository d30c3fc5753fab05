"""Attention of a step's rows over the paged cache, by whichever library does it best.

A backend plans a step once, on the host, and its plan is called in every layer. `gathered` always works and is the
reference; `flashinfer`, `varlen` and `flex` read the pages where they are; `select_backend` measures. All of them read
the same pool, whose keys and values are strided views (`pages_of`).
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.compute.kv_cache import FeedRow, PagedCache


class AttentionPlan(Protocol):
    """The attention of one step's rows, the same in every layer.

    `integers` are what it needs to have on the device; `place` is given them there, as int64 tensors in the same order,
    before the first call.
    """

    @property
    def integers(self) -> Sequence[Sequence[int]]: ...

    def place(self, parts: Sequence[Tensor]) -> None: ...

    def __call__(self, query: Tensor, pool: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Attends each row's queries, (total, heads, head dim), to its keys and values in a layer's pool,
        (positions, 2 x kv heads, head dim), the row's new ones included; shaped as the queries.

        A query at some position sees the keys up to it, with a window only the last `window` of them; that of a tree's
        node sees those on its path (`FeedRow`).
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention."""

    @property
    def name(self) -> str: ...

    @property
    def takes_trees(self) -> bool:
        """Whether rows may have trees."""
        ...

    def plan(self, rows: Sequence[FeedRow], cache: PagedCache) -> AttentionPlan: ...


def pages_of(pool: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and its values, each a view of shape (pages, page size, kv heads, head dim)."""
    keys, values = pool.view(-1, page_size, *pool.shape[1:]).chunk(2, dim=2)
    return keys, values
