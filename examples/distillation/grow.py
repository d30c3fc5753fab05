"""Adds layers to a draft without changing its predictions: their initial output is zero.

By default, new layers follow the first two, so they can read what the trained layers computed from previous tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@torch.no_grad()
def with_layers(draft: PreTrainedModel, after: list[int]) -> PreTrainedModel:
    """Returns a draft with a new layer after each layer index in `after`."""
    config = type(draft.config).from_dict(
        {**draft.config.to_dict(), "num_hidden_layers": draft.config.num_hidden_layers + len(after)}
    )
    grown = type(draft)(config).to(draft.dtype)
    old = draft.get_decoder()
    new = grown.get_decoder()
    new.embed_tokens.load_state_dict(old.embed_tokens.state_dict())
    new.norm.load_state_dict(old.norm.state_dict())
    layers = iter(new.layers)
    for index, layer in enumerate(old.layers):
        next(layers).load_state_dict(layer.state_dict())
        for _ in range(after.count(index)):
            silence(next(layers), config.hidden_size)
    return grown


def silence(layer: torch.nn.Module, hidden: int) -> None:
    """Sets random weights with attention scores of about 1, and output projections of zero."""
    for name, weight in layer.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=hidden**-0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("draft", help="Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="folder for the grown draft")
    parser.add_argument("--after", type=int, nargs="+", default=[0, 1], help="insert a layer after each of these")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=torch.float32)
    grown = with_layers(draft, arguments.after)
    grown.save_pretrained(arguments.out)
    print(f"{grown.num_parameters() / 1e6:.1f} M parameters in {arguments.out}")


if __name__ == "__main__":
    main()
