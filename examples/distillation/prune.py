"""Creates an initial draft from the target by removing most of its layers.

Removes layers one by one, each time the layer whose removal increases the loss least (Kim et al. 2024, arXiv
2402.02834). The pruned model is inaccurate at first, but it keeps the target's embedding and much of its knowledge, so
training it needs far less data than training random layers. Zhang et al. 2023, arXiv 2309.08168, draft with such
models.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from chunks import Example, read_chunk
from rich.console import Console
from target import TargetSource
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Probe:
    """Sequences of one length, with the teacher's top tokens at the scored positions."""

    tokens: Tensor  # [sequences, length]
    rows: Tensor  # [positions]
    columns: Tensor  # [positions]
    top_ids: Tensor  # [positions, k]
    top_probs: Tensor  # [positions, k]; each row sums to 1

    @classmethod
    def of(cls, examples: list[Example], sequences: int, length: int) -> Probe:
        fitting = [e for e in examples if e.tokens.size >= length]
        chosen = [fitting[i] for i in np.linspace(0, len(fitting) - 1, sequences).astype(int)]
        asked = [(e.scored < length) & (e.scored >= e.answer_start - 1) for e in chosen]

        def at_asked(column: str) -> Tensor:
            found = [getattr(e, column)[a] for e, a in zip(chosen, asked, strict=True)]
            return torch.from_numpy(np.concatenate(found).astype(np.float32 if column == "top_probs" else np.int64))

        probs = at_asked("top_probs")
        return cls(
            tokens=torch.from_numpy(np.stack([e.tokens[:length] for e in chosen]).astype(np.int64)),
            rows=torch.from_numpy(np.repeat(np.arange(sequences), [a.sum() for a in asked])),
            columns=at_asked("scored"),
            top_ids=at_asked("top_ids"),
            top_probs=probs / probs.sum(dim=1, keepdim=True),
        )


class Layers:
    """Runs the target with a subset of its layers."""

    def __init__(self, target: PreTrainedModel, probe: Probe) -> None:
        self._target = target
        self._probe = probe
        self._decoder = target.get_decoder()
        self._embedded = self._decoder.embed_tokens(probe.tokens)
        self._angles = self._decoder.rotary_emb(self._embedded, torch.arange(probe.tokens.shape[1])[None])

    def after(self, hidden: Tensor, layer: int) -> Tensor:
        return self._decoder.layers[layer](hidden, attention_mask=None, position_embeddings=self._angles)

    def loss(self, hidden: Tensor) -> tuple[float, float]:
        """Returns the cross-entropy against the teacher, and the share of positions with the teacher's top token."""
        probe = self._probe
        logits = self._target.get_output_embeddings()(self._decoder.norm(hidden[probe.rows, probe.columns])).float()
        logs = logits.log_softmax(dim=-1).gather(1, probe.top_ids)
        agreed = (logits.argmax(dim=-1) == probe.top_ids[:, 0]).float().mean()
        return float(-(probe.top_probs * logs).sum(dim=1).mean()), float(agreed)

    @torch.inference_mode()
    def without_least_useful(self, layers_left: list[int]) -> tuple[int, float, float]:
        """Returns the least important layer with the loss and agreement without it; never the first or last layer."""
        best = (-1, float("inf"), 0.0)
        hidden = self.after(self._embedded, layers_left[0])
        for place in range(1, len(layers_left) - 1):
            rest = hidden
            for layer in layers_left[place + 1 :]:
                rest = self.after(rest, layer)
            best = min(best, (layers_left[place], *self.loss(rest)), key=lambda found: found[1])
            hidden = self.after(hidden, layers_left[place])
        return best


@torch.no_grad()
def with_layers(target: PreTrainedModel, layers_left: list[int]) -> PreTrainedModel:
    """Returns a model of the target's architecture with only the `layers_left` layers."""
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": len(layers_left)})
    draft = type(target)(config).to(target.dtype)
    old = target.get_decoder()
    new = draft.get_decoder()
    new.embed_tokens.load_state_dict(old.embed_tokens.state_dict())
    new.norm.load_state_dict(old.norm.state_dict())
    for place, layer in enumerate(layers_left):
        new.layers[place].load_state_dict(old.layers[layer].state_dict())
    return draft


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="folder for the starting draft")
    parser.add_argument("data", type=Path, nargs="+", help="chunk files with the target's top tokens")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--layers", type=int, nargs="+", default=[10], help="layers to keep; several write OUT-N")
    parser.add_argument("--sequences", type=int, default=12, help="sequences that measure the loss")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    target = TargetSource(arguments.target, arguments.gguf_file).load_model(torch.bfloat16)
    examples = [example for path in arguments.data for example in read_chunk(path)]
    layers = Layers(target, Probe.of(examples, arguments.sequences, arguments.length))
    layers_left = list(range(target.config.num_hidden_layers))
    while len(layers_left) > min(arguments.layers):
        removed, loss, agreement = layers.without_least_useful(layers_left)
        layers_left.remove(removed)
        console.print(
            f"{len(layers_left)} layers without {removed}: loss {loss:.3f}, agreement {agreement:.3f}: {layers_left}"
        )
        if len(layers_left) in arguments.layers:
            several = len(arguments.layers) > 1
            folder = arguments.out.with_name(f"{arguments.out.name}-{len(layers_left)}") if several else arguments.out
            with_layers(target, layers_left).save_pretrained(folder)


if __name__ == "__main__":
    main()
