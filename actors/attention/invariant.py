"""Creates attention that gives a query the same bits in every step.

The kernel for GPUs has fixed blocks, but sums the keys of a tree in the order of its nodes, so it serves chains only.

On a CPU, trials on this processor find the paddings. The sizes of a call alone determine how torch's kernel rounds, so
two sizes that agree in all elements of a large random trial use the same order of summation. An EPYC with AVX-512 BF16,
for instance, sums 193 to 383 keys in two halves, but starts with 192 keys if there are more. Queries that see that many
keys have calls of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import AttentionBackend
from actors.attention.paged import paged_for
from actors.attention.sdpa_gather import KEY_BLOCK, QUERIES, Padding, SdpaGather
from actors.attention.select_backend import (
    BACKEND_ERRORS,
    TOLERANCE,
    AttentionReport,
    AttentionShape,
    Trial,
    check_backend,
)
from cluster.errors import ModelError

VECTOR = 16  # keys that vector units sum in parallel
SPLIT_STEP = 32  # step of the key counts that round differently, each of which needs its own calls
HEADS = 4
# Query counts around those at which torch changes its block size, and counts that leave a remainder.
TRIED_QUERIES = (4, 12, 28, 32, 36, 64, 100, 196, 300, 312, 772)
HIDDEN_KEYS = (8, 100)  # padding keys of a trial


@torch.inference_mode()
def invariant_backend(shape: AttentionShape, device: torch.device) -> tuple[AttentionBackend, AttentionReport]:
    """Returns the backend of a device. Raises ModelError on a GPU whose kernel cannot be used."""
    if device.type == "cpu":
        return invariant_attention(shape), AttentionReport(SdpaGather.name)
    try:
        if not (shape.plain or shape.capped):
            raise ValueError("the kernel does not support the model's attention scores")
        backend = paged_for(device)
        trial = Trial(shape, device)
        check_backend(backend, trial, SdpaGather(), TOLERANCE[shape.dtype], is_padded=True)
        trial.build(backend, trees=False)
    except BACKEND_ERRORS as error:
        raise ModelError(f"model.numerics is invariant, which is impossible here: {error}; set it to fast") from error
    return backend, AttentionReport(backend.name, takes_trees=False)


@torch.inference_mode()
def invariant_attention(shape: AttentionShape) -> SdpaGather:
    """Returns attention on a CPU with the smallest paddings that passed the trials of this shape."""
    trial = _Trial(shape)
    alike = {KEY_BLOCK, *(size for size in range(VECTOR, KEY_BLOCK, VECTOR) if trial.is_alike(size, KEY_BLOCK))}
    others = {size for size in set(range(SPLIT_STEP, KEY_BLOCK, SPLIT_STEP)) - alike if trial.is_alike(size, size)}
    return SdpaGather(Padding(tuple(sorted(alike | others)), frozenset(alike)))


class _Trial:
    """Compares attention over few keys with attention over more keys, of which the others are padding."""

    def __init__(self, shape: AttentionShape) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._shape = shape
        self._query = self._random(TRIED_QUERIES[-1])

    def is_alike(self, size: int, larger: int) -> bool:
        """Returns whether `size` keys give the same bits as `larger` keys, with all numbers of queries tried."""
        for end in {max(2, size - hidden) for hidden in HIDDEN_KEYS}:
            keys, values = self._keys_and_values(end)
            few = torch.cat(torch.split(self._query, QUERIES, 2))  # (parts, heads, queries, head dim)
            expected = _attend(few, keys, values, larger, end).transpose(0, 1).reshape(self._query.shape)
            for queries in TRIED_QUERIES:
                attended = _attend(self._query[:, :, :queries], keys, values, size, end)
                if not torch.equal(attended, expected[:, :, :queries]):
                    return False
        return True

    def _random(self, count: int) -> Tensor:
        sizes = 1, HEADS, count, self._shape.head_dim
        return torch.randn(sizes, generator=self._generator).to(self._shape.dtype)

    def _keys_and_values(self, end: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each (1, heads, KEY_BLOCK, head dim), of which the first `end` matter.

        Keys are in pairs whose values cancel in half of the dimensions: what remains is the error of summation, which
        shows in any data type.
        """
        keys, values = self._random(KEY_BLOCK), self._random(KEY_BLOCK)
        one, other = torch.randperm(end, generator=self._generator).view(2, -1)
        keys[:, :, other] = keys[:, :, one]
        half = self._shape.head_dim // 2
        values[:, :, other, :half] = -values[:, :, one, :half]
        return keys, values


def _attend(query: Tensor, keys: Tensor, values: Tensor, size: int, end: int) -> Tensor:
    """Attends queries, (parts, heads, queries, head dim), to the first `end` of `size` keys."""
    mask = torch.zeros(1, 1, query.shape[2], size, dtype=query.dtype)
    mask[..., end:] = -torch.inf
    keys, values = (part[:, :, :size].expand(len(query), -1, -1, -1) for part in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
