"""Trains induction heads in the added layers of a grown draft, before the whole draft is trained.

Copying takes two steps in a transformer: an early head attends to the previous token, and a later head attends to the
token after an earlier occurrence of the last two tokens. Ordinary data teaches a small draft this only very slowly.
This script therefore supervises some heads of the first added layer to attend to previous tokens, and some heads of the
last added layer to attend to tokens after earlier occurrences. All other layers are frozen.

It then scales the added layers down, so that the draft predicts ordinary text about as well as before: the MLPs output
zero again, the first layer's attention shrinks, and the copying heads weakly pass on the attended token.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from fast import ATTENTION, VocabularyRows
from guide import Guide
from torch import Tensor
from train import BETAS, Data, TrainConfig, distillation_loss, parse_options, save, training_options
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Quiet:
    """Scales of the added layers after induction."""

    previous: float  # factor on the first layer's attention output
    copying: float  # strength of the attended token in the last layer's output


def induce(model: PreTrainedModel, data: Data, config: TrainConfig) -> None:
    """Trains the two layers until the time limit."""
    layers = [model.get_decoder().layers[index] for index in config.guided_layers]
    model.requires_grad_(False)
    chosen = [p for layer in layers for p in layer.requires_grad_(True).parameters()]
    optimizer = torch.optim.AdamW(chosen, betas=BETAS, weight_decay=0.01, fused=True)
    rows = VocabularyRows(model.get_input_embeddings().weight, BETAS)
    end = time.monotonic() + 60 * config.minutes
    for step, batch in enumerate(data.batches()):
        guide = Guide(batch.tokens, config.guided_layers, config.guided_heads)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warmup_steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = distillation_loss(model, rows, batch, config, observe=guide)
        (result.loss + config.guidance * guide.loss()).backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            previous, copying = (float(loss.detach()) for loss in guide.losses)
            print(f"step {step}: missed {previous:.2f} and {copying:.2f}, loss {result.loss.item():.2f}", flush=True)
        if time.monotonic() > end:
            break
    model.requires_grad_(True)


@torch.no_grad()
def settle(model: PreTrainedModel, tokens: Tensor, config: TrainConfig, quiet: Quiet) -> None:
    """Scales down the outputs of both layers; keeps their attention patterns."""
    first, last = config.guided_layers
    for index in (first, last):
        model.get_decoder().layers[index].mlp.down_proj.weight.zero_()
    model.get_decoder().layers[first].self_attn.o_proj.weight.mul_(quiet.previous)
    set_projections(model, tokens, last, config.guided_heads, quiet.copying)


@torch.no_grad()
def set_projections(model: PreTrainedModel, tokens: Tensor, layer: int, heads: int, strength: float) -> None:
    """Makes a layer's heads output the embedding of the attended token, which raises that token's logit.

    The values are a least-squares estimate of the token's embedding from the layer's input. The key-value heads share
    the embedding's first principal directions; each holds a part of them.
    """
    chosen = model.get_decoder().layers[layer]
    embedding = model.get_input_embeddings().weight
    inputs: list[Tensor] = []
    hook = chosen.input_layernorm.register_forward_hook(lambda _module, _inputs, output: inputs.append(output))
    model.get_decoder()(input_ids=tokens, use_cache=False)
    hook.remove()
    read = inputs[0].flatten(0, 1).float()
    wanted = embedding[tokens.flatten()].float()
    centred = wanted - wanted.mean(dim=0)
    estimate = torch.linalg.solve(read.T @ read + 10 * torch.eye(read.shape[1]), read.T @ centred)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    attention = chosen.self_attn
    dim = chosen.self_attn.head_dim
    kept = directions.flip(1)[:, : len(attention.v_proj.weight)]  # [hidden, KV * D]
    scale = (estimate @ kept).norm(dim=0).mean() * read.shape[1] ** -0.5  # scales values like inputs
    attention.v_proj.weight.copy_((estimate @ kept).T / scale)
    groups = attention.num_key_value_groups
    spread = kept.T.reshape(-1, dim, kept.shape[0]).repeat_interleave(groups, 0)  # [H, D, hidden]
    spread[heads:] = 0.0
    attention.o_proj.weight.copy_(strength * scale / groups * spread.flatten(0, 1).T)


def parse_arguments() -> tuple[argparse.Namespace, TrainConfig]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    training_options(parser)
    parser.add_argument("--quiet-previous", type=float, default=0.25, help="share of the first layer's attention kept")
    parser.add_argument("--quiet-copying", type=float, default=16.0, help="strength of the copying heads' output")
    parser.set_defaults(
        minutes=8.0,
        copy_share=1.0,
        random_share=0.6,
        guidance=1.0,
        learning_rate=2e-3,
        warmup_steps=20,
        negatives=1024,
    )
    return parse_options(parser)


def main() -> None:
    arguments, config = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(arguments.start, dtype=torch.float32, attn_implementation=ATTENTION)
    data = Data(config)
    induce(model, data, config)
    settle(model, data.sample(96, 140), config, Quiet(arguments.quiet_previous, arguments.quiet_copying))
    save(model, config.out)


if __name__ == "__main__":
    main()
