"""Computes the target's states offline, for examples that no drafter has seen."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.compute.hidden_states import encode_rows
from actors.learning.head_trainee import HeadLearning, StatesFile
from cluster.learning import Example

BATCH = 8  # examples per forward


@torch.inference_mode()
def layer_states(model: PreTrainedModel, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
    """Returns the states of each text, (tokens, layers x hidden). Layers are numbered as in `protos.messages`."""
    longest = max(map(len, texts))
    padded = [[*text, *[0] * (longest - len(text))] for text in texts]
    # What is padded comes after all that is read, and attention is causal: no mask is needed.
    tokens = torch.tensor(padded, device=model.device)
    streams = model.get_decoder()(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    states = torch.cat([streams[layer] for layer in layers], dim=-1)
    return [states[row, : len(text)] for row, text in enumerate(texts)]


def with_states(
    model: PreTrainedModel,
    head: HeadLearning,
    examples: Sequence[Example],
    states: StatesFile,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Example]:
    """Adds the states of examples that have none to `states`, before any projection; returns the examples, named.

    `advance` is called with the number of examples after each batch.
    """
    named = [replace(example, session=f"{states.sessions + index}") for index, example in enumerate(examples)]
    ordered = sorted(named, key=lambda example: len(example.prompt) + len(example.answer))
    for first in range(0, len(ordered), BATCH):
        group = ordered[first : first + BATCH]
        computed = layer_states(model, [(*each.prompt, *each.answer) for each in group], head.layers)
        for example, rows in zip(group, computed, strict=True):
            states.add(example.session, 0, encode_rows(rows, head.layout.dtype).cpu().numpy().tobytes())
        advance(len(group))
    return named
