"""Training of a few steps for the fixtures' target, with states stored in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.models.checkpoint import load_model
from examples.train_head.heads.target_parts import target_parts
from examples.train_head.options import HeadKind, HeadOptions, Running, Schedule
from examples.train_head.shards import Shards, StatesDescription
from examples.train_head.states import store_states
from examples.train_head.token_files import TokenIds
from examples.train_head.trainer import CURVE, Training
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET

VOCABULARY = 96
LAYERS = (2, 4, 5)
HIDDEN = 32
OPENING = 3
SEQUENCES = 64
LENGTH = 24
UNROLL = 3
CPU = torch.device("cpu")


def sequences(count: int = SEQUENCES) -> list[TokenIds]:
    """Returns random walks of various lengths after a common opening, which a head can learn."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(count):
        walk = 7 + np.cumsum(rng.integers(1, 4, LENGTH - index % 5))
        found.append(np.concatenate([np.arange(OPENING), walk % VOCABULARY]))
    return found


def stored(folder: Path, per_shard: int = 16, target: Path = TARGET, layers: tuple[int, ...] = LAYERS) -> Shards:
    """Stores the states of all sequences, with ids reduced to the target's vocabulary."""
    model = load_model(target, "float32", CPU)
    vocabulary = model.config.get_text_config().vocab_size
    texts = [sequence % vocabulary for sequence in sequences()]
    counts = np.bincount(np.concatenate(texts), minlength=vocabulary)
    StatesDescription(
        target=str(target),
        layers=layers,
        hidden=HIDDEN,
        dtype="float32",
        opening=OPENING,
        sequences=len(texts),
        positions=sum(map(len, texts)),
        token_counts=tuple(counts.tolist()),
        per_shard=per_shard,
    ).write(folder)
    store_states(model, texts, layers, folder, per_shard, 8)
    return Shards(folder)


def a_training(
    out: Path, shards: Shards, head: HeadOptions, steps: int = 12, target: Path = TARGET, **schedule: Any
) -> Training:
    """Returns a float32 training that saves after every fourth step."""
    options = Schedule(steps, batch=8, warmup=2, **{"learning_rate": 1e-2, "lm_head_rate": 1.0, **schedule})
    running = Running(save_every=4, dtype="float32")
    return Training(out, target_parts(str(target)), shards, head, options, running)


def an_option(kind: HeadKind, draft_vocabulary: int | None = None, layers: int = 1) -> HeadOptions:
    return HeadOptions(kind, UNROLL, layers, draft_vocabulary)


def curve(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / CURVE).read_text().splitlines()]
