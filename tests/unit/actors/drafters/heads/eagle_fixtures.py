"""EAGLE heads in published layouts, with outputs of the original code (`tests/data/heads`)."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.compute.linear import Product, projection
from actors.drafters.heads.eagle.config import NO_OVERRIDES, EagleOverrides, canonical, resolve
from actors.drafters.heads.eagle.loading import EagleHead, EagleRunner, head_of
from actors.drafters.heads.files import read_head
from actors.drafters.heads.rope import target_shape
from actors.models.decoder import ForwardOutput

DATA = Path(__file__).parents[4] / "data" / "heads"
TARGET = DATA / "target"
HEADS = ("eagle1", "eagle3", "eagle3_speculators")
CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES = tuple(range(16))
TOLERANCE = 1e-4  # an independent implementation is within 6e-6; wrong conventions are off by 0.05 to 10

Case = dict[str, Tensor]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def checkpoint(name: str) -> Path:
    return DATA / name / "checkpoint"


def case(name: str) -> Case:
    """Returns the reference's inputs and outputs."""
    with np.load(DATA / name / "case.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


def loaded(
    folder: Path,
    overrides: EagleOverrides = NO_OVERRIDES,
    target: Path = TARGET,
    proposable: Collection[int] | None = None,
    product: Product = projection,
) -> EagleHead:
    files = canonical(read_head(folder))
    config = resolve(files, target_shape(target), overrides)
    return head_of(files, config, target, torch.float32, CPU, proposable, product)


def altered(
    folder: Path, name: str, change: Change = dict, drop: tuple[str, ...] = (), section: str = "", **config: Any
) -> Path:
    """Writes a copy of a fixture's checkpoint with changed tensors, and removed and added configuration keys."""
    files = read_head(checkpoint(name))
    kept = {key: value for key, value in files.config.items() if key not in drop}
    if section:
        kept[section] = {key: value for key, value in kept[section].items() if key not in drop} | config
    else:
        kept |= config
    (folder / "config.json").write_text(json.dumps(kept))
    tensors = {key: tensor.contiguous().clone() for key, tensor in change(dict(files.tensors)).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


class Drive:
    """Runs a head on one sequence."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.runner = EagleRunner(head, len(PAGES), PAGE_SIZE)

    def feed(
        self, tokens: Tensor, states: Tensor, start: int, logits: int | None = None, parents: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """Feeds tokens at places from `start` on, with projected states."""
        wanted = len(tokens) if logits is None else logits
        row = InputRow(tuple(tokens.tolist()), start, wanted, PAGES, parents, states)
        return self.runner.forward([row])

    def prefill(self, known: Case) -> ForwardOutput:
        """Feeds the prompt and the token after it."""
        tokens = torch.cat([known["input_ids"][1:], known["next_token"].reshape(1)])
        return self.feed(tokens, self.head.inputs(known["features"]), 0)

    def chain(self, after: ForwardOutput, start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a greedy chain of tokens with their logits and states; the first comes from `after`."""
        logits = [after.logits[-1]]
        assert after.hidden is not None
        hidden = [after.hidden[-1]]
        tokens = [self.token(logits[-1])]
        for place in range(start, start + count - 1):
            output = self.feed(tokens[-1].reshape(1), hidden[-1].reshape(1, -1), place)
            assert output.hidden is not None
            logits.append(output.logits[0])
            hidden.append(output.hidden[0])
            tokens.append(self.token(logits[-1]))
        return torch.stack(tokens), torch.stack(logits), torch.stack(hidden)

    def token(self, logits: Tensor) -> Tensor:
        return self.head.token_ids[logits.argmax()]


def check_steps(
    drive: Drive,
    restated: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    tokens: Tensor,
    states: Tensor,
    tolerance: float = TOLERANCE,
) -> None:
    """Compares a text without its last two tokens, and two further steps fed with the head's own states."""
    length = len(states)
    found = drive.feed(tokens[:length], states, 0)
    for end in (length, length + 1, length + 2):
        logits, own = restated(tokens[:end], states)
        assert found.hidden is not None
        assert off_by(found.logits[-1], logits[-1]) < tolerance
        assert off_by(found.hidden[-1], own[-1]) < tolerance
        states = torch.cat([states, own[-1:]])
        if end < length + 2:
            found = drive.feed(tokens[end : end + 1], found.hidden[-1:], end)


def without(part: str) -> Change:
    """Removes the tensors whose names begin with this prefix."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}


def added(name: str, *shape: int) -> Change:
    """Adds or replaces a tensor."""
    return lambda tensors: tensors | {name: torch.ones(shape)}


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())
