"""Order of training sequences, determined by seed and step so that training can resume."""

from collections.abc import Iterator, Sequence

import numpy as np

from examples.train_head.shards import StoredSequence

HELD_OUT_EVERY = 32  # every 32nd sequence is held out
POOL = 8  # batches sorted together by length, to limit padding


def held_out(sequences: Sequence[StoredSequence]) -> list[StoredSequence]:
    """Returns every 32nd sequence; more shards only append to them, and shards hold shuffled sequences."""
    return list(sequences[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def batches(sequences: Sequence[StoredSequence], size: int, seed: int, step: int) -> Iterator[list[StoredSequence]]:
    """Yields batches without end, starting at `step`; each epoch has a new order."""
    trained = [one for index, one in enumerate(sequences) if (index + 1) % HELD_OUT_EVERY]
    size = min(size, len(trained))
    per_epoch = len(trained) // size
    epoch = step // per_epoch
    first = step % per_epoch
    while True:
        for group in _epoch(trained, size, per_epoch, np.random.default_rng((seed, epoch)))[first:]:
            yield [trained[index] for index in group]
        epoch += 1
        first = 0


def _epoch(trained: Sequence[StoredSequence], size: int, count: int, rng: np.random.Generator) -> list[list[int]]:
    order = rng.permutation(len(trained)).tolist()[: size * count]
    groups: list[list[int]] = []
    for start in range(0, len(order), POOL * size):
        pool = sorted(order[start : start + POOL * size], key=lambda index: len(trained[index]))
        groups += [pool[first : first + size] for first in range(0, len(pool), size)]
    return [groups[index] for index in rng.permutation(len(groups))]
