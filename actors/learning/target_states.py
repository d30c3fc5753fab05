"""Computes the target's states offline, encoded as a drafter keeps them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.compute.hidden_states import CaptureSpec, encode_rows
from actors.learning.examples import KeptStates
from cluster.learning import Example

BATCH = 8  # examples per forward


@torch.inference_mode()
def layer_states(model: PreTrainedModel, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
    """Returns the states of each text, (tokens, layers x hidden). Layers are numbered as in `protos.messages`."""
    longest = max(map(len, texts))
    padded = [[*text, *[0] * (longest - len(text))] for text in texts]
    # Padding follows the text and attention is causal, so no mask is needed.
    tokens = torch.tensor(padded, device=model.device)
    streams = model.get_decoder()(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    states = torch.cat([streams[layer] for layer in layers], dim=-1)
    return [states[row, : len(text)] for row, text in enumerate(texts)]


def kept_states(
    model: PreTrainedModel, spec: CaptureSpec, kind: str, examples: Sequence[Example]
) -> Iterator[KeptStates]:
    """Yields each example's states from position 0 on, shortest examples first."""
    project = spec.projection_on(model.device)
    ordered = sorted(examples, key=lambda example: len(example.prompt) + len(example.answer))
    for first in range(0, len(ordered), BATCH):
        group = ordered[first : first + BATCH]
        computed = layer_states(model, [(*each.prompt, *each.answer) for each in group], spec.layers)
        for example, streams in zip(group, computed, strict=True):
            rows = streams if project is None else project(streams)
            yield KeptStates(example.session, kind, 0, encode_rows(rows, spec.format.dtype).cpu().numpy().tobytes())
