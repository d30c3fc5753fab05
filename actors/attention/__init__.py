"""Attention of a step's rows over the paged cache.

A backend plans each step once, on the host, and every layer calls the plan. `sdpa_gather` is the reference and works on
every device; `paged`, the default on GPUs, `flashinfer` and `varlen` read the pages in place. `select_backend` measures
the backends at start and selects the fastest correct one. All backends read the same pool, whose keys and values are
strided views (`pages_of`). `batch` turns a step's rows into flat tensors, and `hugging_face` registers
`paged_attention` with transformers.

To add a backend, implement `AttentionBackend` and `AttentionPlan` and add an entry to `choose_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from actors.attention.flat_rows import FlatRows
from actors.compute.input_row import Integers
from actors.compute.kv_cache import InputRow, PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """Biases of scores that grow with the key's position (ALiBi, arXiv 2108.12409).

    Biases by distance would differ by a constant per query, which softmax ignores. Types are part of a model, since
    long texts have biases that bfloat16 rounds by several units.
    """

    slopes: Tensor  # (heads,): bias per position
    dtype: torch.dtype  # type of the biases; scores are added in float32
    scaling: float = 1.0  # factor of the biases

    def biases(self, positions: Tensor) -> Tensor:
        """Computes biases from integer key positions: (rows, keys) -> (rows, heads, keys)."""
        return (self.slopes.unsqueeze(1) * positions.unsqueeze(1)).to(self.dtype) * self.scaling


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """Options of one layer's attention scores."""

    scaling: float | None = None  # None: head dim ** -0.5
    window: int | None = None  # a query attends only to the last `window` keys; None: to all
    chunk: int | None = None  # a query attends only to keys in its own chunk of this number of positions, as in Llama 4
    softcap: float | None = None  # bounds scores: softcap * tanh(score / softcap), as in Gemma 2
    sinks: Tensor | None = None  # (heads,): scores of one further key per head, whose value is zero, as in gpt-oss
    alibi: Alibi | None = None  # biases by key position, as in Bloom

    @property
    def is_plain(self) -> bool:
        """True if every backend supports these options."""
        return self.chunk is None and self.softcap is None and self.sinks is None and self.alibi is None


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step's attention."""

    tokens: int
    rows: int
    pages: int  # length of each row's page table

    @classmethod
    def of(cls, flat: FlatRows) -> "StepSizes":
        """Returns the sizes without padding."""
        return StepSizes(len(flat), *flat.tables.shape)


@dataclass(frozen=True, slots=True)
class StepShape(StepSizes):
    """Sizes of a padded step, which determine the shapes of all its tensors."""

    positions: int  # positions with logits
    sampled: int  # positions that are sampled rather than decided by the largest logit
    trees: bool = False  # selects the kernel for trees, in a backend with one kernel for chains and one for trees


class AttentionPlan(Protocol):
    """Attention plan for one step's rows, shared by all layers.

    `integers` lists the numbers to copy to the device. Before the first call, `place` receives them as int64 device
    tensors in the same order.
    """

    @property
    def integers(self) -> Sequence[Sequence[int] | Integers]: ...

    def place(self, parts: Sequence[Tensor]) -> None: ...

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        """Attends each row's queries to the row's keys and values, including new ones.

        Queries have shape (total, heads, head dim), a layer's pool (positions, 2 x kv heads, head dim); the result has
        the queries' shape. A query attends to keys up to its position; with a window, only to the last of them. A tree
        node's query also attends to the nodes on its path (`InputRow`). Of options that are not plain, `paged` supports
        soft caps and `sdpa_gather` all.
        """
        ...


class AttentionBackend(Protocol):
    """Attention kernel over the paged cache."""

    @property
    def name(self) -> str: ...

    @property
    def takes_trees(self) -> bool:
        """True if rows may contain trees."""
        ...

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> AttentionPlan: ...


@runtime_checkable
class PaddedBackend(AttentionBackend, Protocol):
    """Attention kernel that can be captured."""

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> AttentionPlan:
        """Returns a plan that attends `shape.tokens` queries, of which padding gets zeros.

        Its `integers` are those of `paged.step_integers`. All operations from `place` on depend on the shape alone.
        """
        ...


def pages_of(pool: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Returns views of a layer's keys and values, each of shape (pages, page size, kv heads, head dim)."""
    keys, values = pool.view(-1, page_size, *pool.shape[1:]).chunk(2, dim=2)
    return keys, values
