"""Shards of a target's states over token files, written once and read batch by batch without loading whole files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelError

DESCRIPTION = "states.json"
SHARDS = "shard-*.safetensors"


@dataclass(frozen=True, slots=True)
class StatesDescription:
    """Description of a folder of shards; layer numbers follow `protos.messages`."""

    target: str  # folder or Hugging Face id
    layers: tuple[int, ...]  # layers of the stored states; the final state comes after them
    hidden: int
    dtype: str
    opening: int  # length of the sequences' common prefix
    sequences: int
    positions: int
    token_counts: tuple[int, ...]  # by token, (vocabulary,), over all planned shards
    per_shard: int  # sequences per shard

    def write(self, folder: Path) -> None:
        """Writes the description. Raises ModelError if the folder describes other data."""
        path = folder / DESCRIPTION
        text = json.dumps(asdict(self))
        if path.is_file() and path.read_text() != text:
            raise ModelError(f"{path} describes shards of other data or layers; use another folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @classmethod
    def read(cls, folder: Path) -> "StatesDescription":
        """Reads the description. Raises ModelError if the folder has none."""
        path = folder / DESCRIPTION
        if not path.is_file():
            raise ModelError(f"{path} does not exist; run examples.train_head.states first")
        stored: dict[str, Any] = json.loads(path.read_text())
        return cls(**stored | {key: tuple(stored[key]) for key in ("layers", "token_counts")})


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """Location of a sequence in a shard."""

    path: Path
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class StatesBatch:
    """Batch of sequences, padded with zeros at the end."""

    tokens: Tensor  # (rows, longest)
    choices: Tensor  # (rows, longest): the target's greedy next token
    states: Tensor  # (rows, longest, layers x hidden)
    final: Tensor  # (rows, longest, hidden): after the final norm
    lengths: Tensor  # (rows,)


def write_shard(path: Path, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Writes sequences atomically: tokens and choices, (n,), and states, (n, layers x hidden + hidden)."""
    lengths = torch.tensor([0, *(len(tokens) for tokens, _, _ in rows)])
    unfinished = path.with_suffix(".unfinished")
    tensors = {
        "tokens": torch.cat([tokens for tokens, _, _ in rows]).int(),
        "choices": torch.cat([choices for _, choices, _ in rows]).int(),
        "states": torch.cat([states for _, _, states in rows]),
        "starts": lengths.cumsum(0),
    }
    save_file(tensors, unfinished)
    unfinished.replace(path)


class Shards:
    """All sequences currently in a folder."""

    def __init__(self, folder: Path) -> None:
        self.description = StatesDescription.read(folder)
        self.sequences = [found for path in sorted(folder.glob(SHARDS)) for found in _sequences(path)]
        if not self.sequences:
            raise ModelError(f"{folder} contains no {SHARDS} yet; run examples.train_head.states first")

    def batch(self, sequences: Sequence[StoredSequence], device: torch.device) -> StatesBatch:
        """Reads the given sequences into a padded batch."""
        parts = [_read(sequence) for sequence in sequences]
        tokens, choices, states = (
            torch.nn.utils.rnn.pad_sequence([part[index] for part in parts], batch_first=True).to(device)
            for index in range(3)
        )
        hidden = self.description.hidden
        return StatesBatch(
            tokens=tokens.long(),
            choices=choices.long(),
            states=states[..., :-hidden],
            final=states[..., -hidden:],
            lengths=torch.tensor([len(sequence) for sequence in sequences], device=device),
        )


def _sequences(path: Path) -> list[StoredSequence]:
    with safe_open(path, "pt") as shard:
        starts = shard.get_tensor("starts").tolist()
    return [StoredSequence(path, start, end) for start, end in pairwise(starts)]


def _read(sequence: StoredSequence) -> tuple[Tensor, ...]:
    with safe_open(sequence.path, "pt") as shard:
        return tuple(shard.get_slice(key)[sequence.start : sequence.end] for key in ("tokens", "choices", "states"))
