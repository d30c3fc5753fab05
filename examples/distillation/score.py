"""Scores existing text: computes the target's top next tokens at every position of given sequences.

Runs one forward pass over each sequence, so a token costs a fraction of a generated one. Reads an `.npz` file with an
array `tokens` [sequences, length] of ids. Each row begins with the chat template's opening and is padded with its
end-of-turn id. Writes chunk files for `train.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from chunks import Example, write_chunk
from rich.console import Console
from rich.progress import track
from target import ChatFrame, TargetSource, end_of_turn_ids
from torch import Tensor
from transformers import PreTrainedModel

POSITIONS_AT_ONCE = 256


def without_padding(row: np.ndarray, ends: frozenset[int]) -> np.ndarray:
    """Returns the row up to and including the first of its trailing end-of-turn ids."""
    length = row.size
    while length > 1 and int(row[length - 1]) in ends and int(row[length - 2]) in ends:
        length -= 1
    return row[:length]


def answer_start(tokens: np.ndarray, frame: ChatFrame) -> int:
    """Returns the index of the first answer's first token, or the length if there is no answer."""
    after = np.array(frame.after_user)
    for index in range(len(frame.before_user), tokens.size - after.size + 1):
        if np.array_equal(tokens[index : index + after.size], after):
            return index + after.size
    return tokens.size


def likeliest(head: torch.nn.Module, hidden: Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `top_k` next tokens at each position, and their probabilities normalized over the top k."""
    ids = []
    probs = []
    for part in hidden.split(POSITIONS_AT_ONCE):
        values, indices = head(part).topk(top_k, dim=-1)
        ids.append(indices.to(torch.int32).numpy())
        probs.append(values.float().softmax(dim=-1).numpy())
    return np.concatenate(ids), np.concatenate(probs)


@torch.inference_mode()
def score(model: PreTrainedModel, rows: list[np.ndarray], frame: ChatFrame, kind: str, top_k: int) -> list[Example]:
    """Scores sequences of any lengths in one forward pass."""
    longest = max(row.size for row in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    for index, row in enumerate(rows):
        tokens[index, : row.size] = row
    hidden = model.get_decoder()(input_ids=torch.from_numpy(tokens), use_cache=False).last_hidden_state
    first = len(frame.before_user) - 1
    examples = []
    for index, row in enumerate(rows):
        ids, probs = likeliest(model.get_output_embeddings(), hidden[index, first : row.size - 1], top_k)
        scored = np.arange(first, row.size - 1)
        examples.append(Example(kind, row, answer_start(row, frame), scored, ids, probs))
    return examples


def batches(rows: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("tokens", type=Path, help="`.npz` file with the sequences")
    parser.add_argument("out", type=Path, help="folder for the chunk files")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--kind", default="dialogue", help="prompt kind to store in the chunks")
    parser.add_argument("--batch", type=int, default=4, help="sequences per forward pass")
    parser.add_argument("--chunk-sequences", type=int, default=64, help="sequences per file")
    parser.add_argument("--top-k", type=int, default=24, help="teacher probabilities kept per position")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    source = TargetSource(arguments.target, arguments.gguf_file)
    model = source.load_model(torch.bfloat16)
    frame = ChatFrame.of(source.load_tokenizer())
    ends = end_of_turn_ids(model)
    with np.load(arguments.tokens) as file:
        rows = [without_padding(row, ends) for row in file["tokens"].astype(np.int64)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    groups = list(batches(rows, arguments.chunk_sequences))
    for number, group in enumerate(track(groups, "scoring", console=Console(stderr=True))):
        parts = [score(model, part, frame, arguments.kind, arguments.top_k) for part in batches(group, arguments.batch)]
        path = arguments.out / f"{arguments.tokens.stem}-{number:04d}.npz"
        write_chunk(path, [example for part in parts for example in part])


if __name__ == "__main__":
    main()
