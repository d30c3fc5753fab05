"""Turns a step's rows into flat tensors on the device: tokens, positions, cache slots and attention plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.attention import AttentionBackend, ScoreOptions
from actors.compute.kv_cache import InputRow, PagedCache, to_device
from actors.compute.recurrent_states import Advance


class Interrupted(Exception):
    """Raised when a forward is abandoned. The cache slots of its rows are then undefined."""


def never() -> bool:
    """Default interruption check: always False."""
    return False


class RaggedBatch:
    """Concatenated rows of varying length; all of their integers are copied to the device in one operation."""

    def __init__(
        self,
        rows: Sequence[InputRow],
        cache: PagedCache,
        backend: AttentionBackend,
        interrupted: Callable[[], bool] = never,
    ) -> None:
        self.cache = cache
        self._rows = rows
        self._interrupted = interrupted
        size = cache.page_size
        tokens = [token for row in rows for token in row.tokens]
        positions = [at for row in rows for at in row.positions]
        written = [row.pages[at // size] * size + at % size for row in rows for at in row.slots]
        self._plan = backend.plan(rows, cache)
        parts = to_device([tokens, positions, written, _logit_indices(rows), *self._plan.integers], cache.device)
        # tokens, positions: (total,); written: (total,) slots in the pool; logit_at: (requested,) indices in the batch
        self.tokens, self.positions, self.written, self.logit_at = parts[:4]
        self._plan.place(parts[4:])

    def attend(
        self,
        layer: int,
        query: Tensor,  # (total, heads, head dim)
        key_value: Tensor,  # (total, 2 x kv heads, head dim): keys, then values
        options: ScoreOptions,
    ) -> Tensor:
        """Caches the new keys and values, then attends each row to its own; returns (total, heads x head dim).

        Checks for an interruption first, so once per layer, and raises Interrupted.
        """
        if self._interrupted():
            raise Interrupted
        total, both, head_dim = key_value.shape
        pool = self.cache.layer(layer, both // 2, head_dim)
        pool.index_copy_(0, self.written, key_value)
        return self._plan(query, pool, options).reshape(total, -1)

    def recur(self, layer: int, inputs: Tensor, advance: Advance) -> Tensor:
        """Computes a recurrent layer for each row, from the row's own state: (total, hidden) -> (total, hidden)."""
        states = self.cache.recurrent
        parts = torch.split(inputs, [len(row.tokens) for row in self._rows])
        return torch.cat([states.feed(layer, row, part, advance) for row, part in zip(self._rows, parts, strict=True)])


def _logit_indices(rows: Sequence[InputRow]) -> list[int]:
    """Returns the indices in the flat batch at which logits are requested."""
    indices: list[int] = []
    end = 0
    for row in rows:
        end += len(row.tokens)
        indices += range(end - row.logits, end)
    return indices
