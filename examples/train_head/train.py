"""Trains a draft head on a target's stored states, and writes it in a published layout.

    python -m examples.train_head.train TARGET STATES OUT [--draft-vocabulary 8192] [--steps 2000] [--minutes 30]

OUT/best holds the head with the highest held-out agreement, OUT/latest the newest head, and OUT/curve.jsonl the
learning curve. The same command resumes an earlier run.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from examples.train_head.heads.target_parts import target_parts
from examples.train_head.options import HeadKind, HeadOptions, Running, Schedule
from examples.train_head.shards import Shards
from examples.train_head.trainer import Training


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hugging Face id.")],
    states: Annotated[Path, typer.Argument(help="Folder written by examples.train_head.states.")],
    out: Annotated[Path, typer.Argument(help="Folder for the head and the state needed to continue.")],
    kind: Annotated[HeadKind, typer.Option(help="Kind of head.")] = HeadKind.EAGLE,
    unroll: Annotated[int, typer.Option(help="Tokens drafted in training, such as Medusa heads.")] = 3,
    layers: Annotated[int, typer.Option(help="Layers of an EAGLE or DFlash head.")] = 1,
    draft_vocabulary: Annotated[int | None, typer.Option(help="Number of most frequent tokens to propose.")] = None,
    steps: Annotated[int, typer.Option(help="Total steps; the learning rate falls to 0.")] = 2000,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    lm_head_rate: Annotated[float, typer.Option(help="Relative learning rate of embeddings, LM heads.")] = 0.2,
    scored_share: Annotated[float, typer.Option(help="Random share of places in the loss.")] = 1.0,
    minutes: Annotated[float, typer.Option(help="Time limit of this run; the next run continues.")] = float("inf"),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints and held-out measurements.")] = 100,
    held_out: Annotated[int, typer.Option(help="Maximum held-out sequences.")] = 32,
    dtype: Annotated[str, typer.Option(help="Dtype of products in training and of the written head.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and sequence order.")] = 0,
) -> None:
    """Trains a draft head."""
    torch.set_num_threads(threads)
    training = Training(
        out,
        target_parts(target),
        Shards(states),
        HeadOptions(kind, unroll, layers, draft_vocabulary, seed),
        Schedule(steps, batch, learning_rate, lm_head_rate, scored_share=scored_share),
        Running(minutes, save_every, held_out, dtype, device),
    )
    parameters = sum(parameter.numel() for parameter in training.module.parameters())
    Console().print(f"{parameters / 1e6:.1f} M parameters, from step {training.step}")
    training.run()


if __name__ == "__main__":
    typer.run(main)
