"""Gumbel noise is a pure function of its address, equal on every device.

Statistical tests have a false-alarm rate of 1e-6 per change of their seeds.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from actors.sampling.gumbel import Purpose, gumbel, gumbels, key, keys, uniform, uniform_scalar

FALSE_ALARM = 1e-6
MASK = (1 << 64) - 1
KEYS = st.integers(-(1 << 63), (1 << 63) - 1)


def reference(at: int, token_id: int) -> float:
    """Computes splitmix64's finaliser in Python integers, the reference for every device."""
    x = (at + token_id * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (((x ^ (x >> 31)) >> 12) + 0.5) / 2**52


@given(KEYS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_tensors_agree_with_integers_bit_for_bit(at, token_ids):
    """An arithmetic shift, a float on the way or a 32-bit product would differ between devices."""
    found = uniform(torch.tensor([at]), torch.tensor(token_ids)).tolist()
    assert found == [reference(at, token_id) for token_id in token_ids]
    assert uniform_scalar(at) == reference(at, 0)


def test_keys_of_several_positions_equal_those_of_each():
    found = keys(MASK, 3, range(7, 12), Purpose.DRAW)
    assert found == [key(MASK, 3, position, Purpose.DRAW) for position in range(7, 12)]
    assert len(set(found)) == len(found)


def key_with_bits(bits: int) -> int:
    """Inverts the finaliser; returns the key with these 64 bits for token 0."""

    def unshift(y: int, shift: int) -> int:
        x = y
        for _ in range(64 // shift + 1):
            x = y ^ (x >> shift)
        return x

    x = unshift(bits, 31)
    x = unshift((x * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK, 27)
    x = unshift((x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK, 30)
    return x - (1 << 64) if x >> 63 else x


def test_the_extremes_are_inside_the_open_interval():
    """A uniform number that rounds to 1 gives infinite noise, which draws its token for any logits."""
    for bits in (0, MASK):
        at = key_with_bits(bits)
        assert 0.0 < uniform_scalar(at) < 1.0
        assert math.isfinite(float(gumbel(at, torch.arange(1))))


def test_noise_does_not_depend_on_the_batch_or_on_the_vocabulary():
    """Drafter and target have different batches, and often different padding."""
    keys = [key(7, 0, position, Purpose.DRAW) for position in range(5)]
    together = torch.stack([gumbel(at, torch.arange(1000)) for at in keys])
    for row, at in enumerate(keys):
        assert torch.equal(gumbel(at, torch.arange(100)), together[row, :100])


def test_every_part_of_the_address_matters():
    parts = [(seed, choice, position, purpose) for seed in (1, 2) for choice in (0, 1) for position in (0, 1)
             for purpose in Purpose]  # fmt: skip
    assert len({key(*part) for part in parts}) == len(parts)
    assert key(1, 2, 3, Purpose.DRAW) != key(2, 1, 3, Purpose.DRAW) != key(1, 3, 2, Purpose.DRAW)
    assert all(-(1 << 63) <= key(*part) < 1 << 63 for part in parts), "torch must hold it"


def test_noise_is_uniform_over_tokens_positions_and_seeds():
    """The test covers each axis alone, since other axes would hide a weakness."""
    axes = {
        "tokens": uniform(torch.tensor([key(5, 0, 9, Purpose.DRAW)]), torch.arange(20_000)).tolist(),
        "positions": [uniform_scalar(key(5, 0, position, Purpose.ACCEPT)) for position in range(20_000)],
        "seeds": [uniform_scalar(key(seed, 0, 9, Purpose.ACCEPT)) for seed in range(20_000)],
    }
    for name, values in axes.items():
        assert kstest(values, "uniform").pvalue > FALSE_ALARM, name


def test_neighbours_and_purposes_are_independent():
    """Acceptance noise correlated with drafting noise or with a neighbor's noise would bias acceptance."""
    for other in ((1, Purpose.ACCEPT), (0, Purpose.RECOVER), (0, Purpose.DRAFT), (0, Purpose.DRAW)):
        step, purpose = other
        cells = [0] * 16
        for position in range(8000):
            a = uniform_scalar(key(3, 0, position, Purpose.ACCEPT))
            b = uniform_scalar(key(3, 0, position + step, purpose))
            cells[4 * int(4 * a) + int(4 * b)] += 1
        assert chisquare(cells).pvalue > FALSE_ALARM, other


def test_the_gumbel_maximum_draws_from_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    keys = torch.tensor([key(seed, 0, 0, Purpose.DRAW) for seed in range(20_000)])
    counts = torch.bincount((logits + gumbels(keys.unsqueeze(1), torch.arange(4))).argmax(dim=-1), minlength=4)
    assert chisquare(counts.tolist(), (torch.softmax(logits.double(), 0) * 20_000).tolist()).pvalue > FALSE_ALARM
