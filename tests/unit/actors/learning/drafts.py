"""Tiny Llama drafts on disk, optionally with a recurrent head and a list of frequent tokens."""

import json
import resource
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.drafters.model.forwards import FILE as FREQUENT_TOKENS
from actors.learning.recurrent_head import TrainableRecurrentHead
from cluster.learning import Example

VOCABULARY = 40
HIDDEN = 16
WIDE = 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


def write_draft(
    folder: Path,
    *,
    width: int = 1,
    frequent: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
) -> Path:
    """Writes a draft with random weights that predicts `width` tokens per forward."""
    torch.manual_seed(3)
    config = LlamaConfig(**SHAPE, initializer_range=0.3, tie_word_embeddings=tied)
    if width > 1:
        config.tokens_per_forward = width
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    if width > 1:
        head = TrainableRecurrentHead(HIDDEN, WIDE, config.rms_norm_eps)
        torch.nn.init.normal_(head.down.weight, std=0.5)
        head.save(folder, dtype)
    if frequent is not None:
        (folder / FREQUENT_TOKENS).write_text(json.dumps(frequent))
    return folder


def some_examples(count: int, seed: int = 0, answer: int = 12) -> list[Example]:
    """Draws prompts and answers at random."""
    drawn = torch.Generator().manual_seed(seed)
    texts = torch.randint(VOCABULARY, (count, 6 + answer), generator=drawn).tolist()
    return [Example(tuple(text[: 3 + index % 4]), tuple(text[6:])) for index, text in enumerate(texts)]


def holding(folder: Path, tokens: Sequence[int]) -> set[str]:
    """Returns the files below `folder` that contain eight consecutive tokens, in binary or as text."""
    found = set()
    parts = [tokens[first : first + 8] for first in range(len(tokens) - 7)]
    forms = [array(code, part).tobytes() for part in parts for code in "iq"]
    forms += [gap.join(map(str, part)).encode() for part in parts for gap in (",", ", ")]
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if any(form in data for form in forms):
                found.add(path.name)
    return found


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """Makes writes beyond this file size fail in this process."""
    earlier, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (earlier, most))
