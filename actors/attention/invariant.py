"""Finds paddings for which attention gives a query the same bits in every step, by trials on this processor.

The sizes of a call alone determine how torch's CPU kernel rounds, so two sizes that agree in all elements of a large
random trial use the same order of summation. An EPYC with AVX-512 BF16, for instance, sums 193 to 383 keys in two
halves, but starts with 192 keys if there are more. Queries that need such sizes have calls of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention.sdpa_gather import KEY_BLOCK, QUERIES, Padding, SdpaGather
from actors.attention.select_backend import AttentionShape

STEP = 16  # keys that vector units sum in parallel
SPLIT_STEP = 32  # step of sizes that are unlike; each has its own call
# Query counts around those at which torch changes its block size, and counts that leave a remainder.
TRIED_QUERIES = (4, 28, 32, 36, 64, 196, 772)
HIDDEN_KEYS = (7, 100)  # padding keys of a trial


@torch.inference_mode()
def invariant_attention(shape: AttentionShape) -> SdpaGather:
    """Returns attention on CPUs with the smallest paddings that passed the trials of this shape."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(1, shape.kv_heads, *sizes, generator=generator).to(shape.dtype)

    trial = _Trial(random(TRIED_QUERIES[-1], shape.head_dim), random(2, KEY_BLOCK, shape.head_dim))
    alike = {KEY_BLOCK, *(size for size in range(STEP, KEY_BLOCK, STEP) if trial.is_alike(size, KEY_BLOCK))}
    others = {size for size in set(range(SPLIT_STEP, KEY_BLOCK, SPLIT_STEP)) - alike if trial.is_alike(size, size)}
    return SdpaGather(Padding(tuple(sorted(alike | others)), frozenset(alike)))


class _Trial:
    """Compares attention over few keys with attention over more keys, of which the others are padding."""

    def __init__(self, query: Tensor, keys_and_values: Tensor) -> None:
        self._query = query
        self._keys, self._values = keys_and_values.unbind(2)

    def is_alike(self, size: int, larger: int) -> bool:
        """Returns whether `size` keys give the same bits as `larger` keys, with all numbers of queries tried."""
        for end in {max(1, size - hidden) for hidden in HIDDEN_KEYS}:
            few = torch.cat(torch.split(self._query, QUERIES, 2))  # (parts, kv heads, queries, head dim)
            expected = self._attend(few, larger, end).transpose(0, 1).reshape(self._query.shape)
            for queries in TRIED_QUERIES:
                if not torch.equal(self._attend(self._query[:, :, :queries], size, end), expected[:, :, :queries]):
                    return False
        return True

    def _attend(self, query: Tensor, size: int, end: int) -> Tensor:
        """Attends queries, (parts, kv heads, queries, head dim), to the first `end` of `size` keys."""
        mask = torch.zeros(1, 1, query.shape[2], size, dtype=query.dtype)
        mask[..., end:] = -torch.inf
        keys, values = (part[:, :, :size].expand(len(query), -1, -1, -1) for part in (self._keys, self._values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
