"""Averages the weights of drafts from one training run, which is often slightly better than each draft."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@torch.no_grad()
def average(drafts: list[PreTrainedModel]) -> PreTrainedModel:
    """Returns the first draft with the mean of all drafts' weights."""
    weights = [dict(draft.named_parameters()) for draft in drafts]
    for name, weight in weights[0].items():
        weight.copy_(torch.stack([each[name] for each in weights]).mean(dim=0))
    return drafts[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the averaged draft")
    parser.add_argument("drafts", nargs="+", help="Hugging Face folders or ids")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    drafts = [AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32) for draft in arguments.drafts]
    average(drafts).to(torch.bfloat16).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
