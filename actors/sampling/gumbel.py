"""Randomness as a pure function of its address: (seed, choice, position, purpose, token id).

All arithmetic except the last step uses integers, so drafter and target draw the same noise on any device, in any batch
and in any order. There is no generator and no state.
"""

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from protos.prefix import hashes_after

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLY_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLY_2 = -7723592293110705685  # 0x94D049BB133111EB
_SIGN = 1 << 63
NOISE_PER_GROUP = {"cpu": 1 << 16, "cuda": 1 << 22}  # numbers per slice; fit in a CPU's cache, or fill a GPU


class Purpose(IntEnum):
    """Uses of noise, each with its own random stream."""

    DRAW = 1  # draws of the target and, under Gumbel coupling, of the drafter
    ACCEPT = 2  # rejection sampling: acceptance of a draft token
    RECOVER = 3  # rejection sampling: draw of the recovered token
    DRAFT = 4  # rejection sampling: draws of the drafter


def key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """Returns the 64-bit key of one draw, as a signed integer for torch."""
    return keys(seed, choice, (position,), purpose)[0]


def keys(seed: int, choice: int, positions: Iterable[int], purpose: Purpose) -> list[int]:
    """Returns the keys of a text's draws at several positions."""
    of_text = hashes_after(seed, (choice,))[0]
    last = int(purpose)
    states = [hashes_after(of_text, (position, last))[1] for position in positions]
    return [state - (1 << 64) if state & _SIGN else state for state in states]


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically; torch's operator shifts arithmetically."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns uniform numbers in (0, 1), float64, for int64 `keys` and `token_ids` of broadcastable shapes.

    Applies splitmix64's finaliser (Steele et al. 2014) to key + id x golden ratio; int64 products wrap. Works in place,
    since for a whole vocabulary, memory traffic takes as long as the arithmetic.
    """
    x = keys + token_ids * _GOLDEN
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MULTIPLY_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MULTIPLY_2)
    x.bitwise_xor_(_shift_right(x, 31))
    bits = _shift_right(x, 12)  # 52 bits, so that adding 0.5 is exact in float64
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel(at: int, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise of key `at` for `token_ids`, float64."""
    return gumbels(torch.tensor(at, dtype=torch.int64, device=token_ids.device), token_ids)


def gumbels(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise for int64 `keys` and `token_ids` of broadcastable shapes, float64."""
    return uniform(keys, token_ids).log_().neg_().log_().neg_()


def gumbel_argmax(scores: Tensor, at: int) -> int:
    """Draws one token from softmax(scores), (vocabulary,), as the argmax of scores plus the noise of key `at`.

    Computes no noise for tokens at -inf, which cannot win: after top-k or top-p, few tokens remain.
    """
    ids = torch.isneginf(scores).logical_not().nonzero().squeeze(1)
    if ids.numel() == 0:  # returns a token even for non-finite logits
        return int(scores.argmax())
    return int(ids[(scores[ids] + gumbel(at, ids)).argmax()])


def gumbel_argmaxes(scores: Tensor, keys: Tensor) -> Tensor:
    """Computes `gumbel_argmax` per row on the device: scores (rows, vocabulary), keys (rows,) -> tokens (rows,)."""
    return gumbel_maxima(scores, keys)[1]


def gumbel_maxima(scores: Tensor, keys: Tensor, begin: int = 0) -> tuple[Tensor, Tensor]:
    """Returns each row's largest score plus noise, float64, and its column; the first column is token `begin`."""
    ids = torch.arange(begin, begin + scores.shape[1], device=scores.device)
    at_once = max(1, NOISE_PER_GROUP[scores.device.type] // len(ids))
    parts = zip(torch.split(scores, at_once), torch.split(keys, at_once), strict=True)
    maxima = [gumbels(some.unsqueeze(1), ids).add_(part).max(dim=-1) for part, some in parts]
    return torch.cat([part.values for part in maxima]), torch.cat([part.indices for part in maxima])


def gumbel_argmaxes_among(scores: Tensor, keys: Tensor, candidates: Tensor) -> Tensor:
    """Computes `gumbel_argmaxes`, restricted to `candidates`, (rows, count), which must include the result."""
    noisy = scores.gather(-1, candidates) + gumbels(keys.unsqueeze(1), candidates)
    return candidates.gather(-1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)


def uniform_scalar(at: int) -> float:
    """Computes `uniform` for one key and token id 0, without tensors."""
    mask = (1 << 64) - 1
    x = at & mask
    x = ((x ^ (x >> 30)) * (_MULTIPLY_1 & mask)) & mask
    x = ((x ^ (x >> 27)) * (_MULTIPLY_2 & mask)) & mask
    return (((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52
