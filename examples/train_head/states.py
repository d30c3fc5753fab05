"""Stores the target's hidden states over token files: the layers a head reads, and the final state for the loss.

    python -m examples.train_head.states TARGET STATES TOKENS.npz... [--layer 2 --layer 15 --layer 27]

Shuffles sequences before splitting them into shards, so each shard is a random sample. A repeated call resumes an
interrupted run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from actors.drafters.heads.eagle.config import default_states
from actors.models.checkpoint import load_model, local_folder
from examples.train_head.shards import StatesDescription, write_shard
from examples.train_head.token_files import TokenIds, common_opening, read_tokens

SHUFFLE_SEED = 0

Rows = list[tuple[Tensor, Tensor, Tensor]]


@torch.inference_mode()
def states_of(model: PreTrainedModel, sequences: Sequence[TokenIds], layers: Sequence[int]) -> Rows:
    """Returns each sequence's tokens and greedy choices, (n,), and states, (n, (layers + 1) x hidden)."""
    lengths = [len(sequence) for sequence in sequences]
    padded = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    tokens = torch.from_numpy(padded).to(model.device)
    # Padding is at the end and attention is causal, so no mask is needed.
    output = model.get_decoder()(input_ids=tokens, use_cache=False, output_hidden_states=True)
    streams = output.hidden_states
    choices = model.get_output_embeddings()(streams[-1]).argmax(dim=-1)
    states = torch.cat([*(streams[layer] for layer in layers), streams[-1]], dim=-1)
    return [
        (tokens[row, :length].cpu(), choices[row, :length].cpu(), states[row, :length].cpu())
        for row, length in enumerate(lengths)
    ]


def store_states(
    model: PreTrainedModel, sequences: Sequence[TokenIds], layers: Sequence[int], out: Path, per_shard: int, batch: int
) -> None:
    """Writes the missing shards; holds only one shard in memory."""
    shuffled = np.random.default_rng(SHUFFLE_SEED).permutation(len(sequences))
    for start in track(range(0, len(shuffled), per_shard), description="shards of states"):
        path = out / f"shard-{start // per_shard:05d}.safetensors"
        if path.is_file():
            continue
        mine = sorted((sequences[index] for index in shuffled[start : start + per_shard]), key=len)
        rows = [
            row for first in range(0, len(mine), batch) for row in states_of(model, mine[first : first + batch], layers)
        ]
        write_shard(path, rows)


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hugging Face id.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    token_files: Annotated[list[Path], typer.Argument(help="Files written by examples.train_head.answers.")],
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer whose states to store; default: EAGLE-3's layers.")
    ] = None,
    final_only: Annotated[bool, typer.Option(help="Store only the final state, for Medusa and MLPSpeculator.")] = False,
    per_shard: Annotated[int, typer.Option(help="Sequences per shard.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of the forward pass and stored states.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device of the forward pass.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Stores a target's hidden states over token files."""
    torch.set_num_threads(threads)
    model = load_model(local_folder(target), dtype, torch.device(device))
    sequences = [sequence for path in token_files for sequence in read_tokens(path)]
    config = model.config.get_text_config()
    layers = () if final_only else tuple(sorted(layer or default_states(config.num_hidden_layers)))
    StatesDescription(
        target=target,
        layers=layers,
        hidden=config.hidden_size,
        dtype=dtype,
        opening=common_opening(sequences),
        sequences=len(sequences),
        positions=sum(map(len, sequences)),
        token_counts=tuple(np.bincount(np.concatenate(sequences), minlength=config.vocab_size).tolist()),
        per_shard=per_shard,
    ).write(out)
    store_states(model, sequences, layers, out, per_shard, batch)


if __name__ == "__main__":
    typer.run(main)
