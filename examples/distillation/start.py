"""Creates an initial draft: random layers with a low-dimensional copy of the target's embedding.

The embedding is by far the largest part of a small draft. It starts as the target's embedding projected onto its
principal directions, so similar tokens start close to each other.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from target import TargetSource
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ROPE_THETA = 100_000.0


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama draft."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@torch.no_grad()
def new_draft(target: PreTrainedModel, shape: Shape) -> LlamaForCausalLM:
    """Returns random layers with the target's tied embedding, reduced to `shape.hidden` dimensions."""
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=target.config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
        pad_token_id=target.config.pad_token_id,
        tie_word_embeddings=True,
    )
    draft = LlamaForCausalLM(config).float()
    embedding = target.get_input_embeddings().weight.float()
    _, directions = torch.linalg.eigh(embedding.T @ embedding)
    reduced = embedding @ directions.flip(1)[:, : shape.hidden]
    draft.get_input_embeddings().weight.copy_(reduced / reduced.norm(dim=1).mean())
    return draft


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="folder for the starting draft")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--hidden", type=int, default=288)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    shape = Shape(**{name: getattr(arguments, name) for name in Shape.__dataclass_fields__})
    target = TargetSource(arguments.target, arguments.gguf_file).load_model(torch.float32)
    draft = new_draft(target, shape)
    draft.save_pretrained(arguments.out)
    print(f"{draft.num_parameters() / 1e6:.1f} M parameters in {arguments.out}")


if __name__ == "__main__":
    main()
