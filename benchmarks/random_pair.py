r"""Builds a target and a draft of published sizes with random weights and a chosen rate of agreement.

    python benchmarks/random_pair.py FOLDER --tokenizer CHECKPOINT [--size 8b] [--agreement 0.75]
    slipstream bench FOLDER/pair.yaml

By default, the target has the layer shapes of Llama 3.1 8B. Without its layers it would follow a fixed random cycle
through the vocabulary, because the embedding of each token is the LM-head row of its successor. Its layers perturb the
cycle, scaled until the greedy choice follows it at the requested rate. The draft has the same embedding and LM head;
its layers cost time but add zero. Step times therefore equal those with trained weights, and the generated text is
meaningless.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

SIZES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
}
KV_HEADS = 8
DRAFT_PART = 8  # target layers per draft layer
TRIED = (8, 256)  # rows and tokens for measuring the agreement
HALVINGS = 12
CONTEXT = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def config_of(size: str, vocabulary: int, layers: int) -> LlamaConfig:
    sizes = SIZES[size] | {"num_hidden_layers": layers}
    return LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rope_theta=500_000.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, **sizes,
    )  # fmt: skip


@torch.inference_mode()
def random_model(config: LlamaConfig, device: torch.device) -> PreTrainedModel:
    """Returns a bfloat16 model whose embedding and LM head encode the cycle; the cycle is the same for every model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(1)
    embedding = model.get_input_embeddings().weight
    embedding.normal_()
    model.get_output_embeddings().weight[successors(config.vocab_size, device)] = embedding
    return model


def successors(vocabulary: int, device: torch.device) -> Tensor:
    """Returns each token's successor, (vocabulary,), in one cycle through all tokens."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2)).to(device)
    after = torch.empty_like(order)
    after[order] = order.roll(-1)
    return after


def disturbing_weights(model: PreTrainedModel) -> list[Tensor]:
    """Returns the output projections of all layers; scaling them scales each layer's contribution."""
    layers = model.model.layers
    return [weight for layer in layers for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)]


@torch.inference_mode()
def agreement(model: PreTrainedModel) -> float:
    """Returns the share of positions in random prompts at which the greedy choice is the successor."""
    device = model.device
    vocabulary = int(model.config.vocab_size)
    tokens = torch.randint(vocabulary, TRIED, generator=torch.Generator().manual_seed(3)).to(device)
    after = successors(vocabulary, device)
    agreed = sum((model(row[None]).logits[0].argmax(-1) == after[row]).sum().item() for row in tokens)
    return agreed / tokens.numel()


@torch.inference_mode()
def add_noise(model: PreTrainedModel, agreement_rate: float) -> float:
    """Scales the layers until the greedy choice follows the cycle at `agreement_rate`; returns the actual rate."""
    weights = disturbing_weights(model)
    originals = [weight.clone() for weight in weights]
    least, most = 0.0, 1024.0
    for _ in range(HALVINGS):
        middle = (max(least, 1e-3) * most) ** 0.5
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original * middle)
        if agreement(model) > agreement_rate:
            least = middle
        else:
            most = middle
    return agreement(model)


@torch.inference_mode()
def silence(model: PreTrainedModel) -> None:
    """Zeroes the contribution of all layers."""
    for weight in disturbing_weights(model):
        weight.zero_()


def save(model: PreTrainedModel, tokenizer: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="checkpoint folder; sets the vocabulary")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--agreement", type=float, default=0.75)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = len(AutoTokenizer.from_pretrained(arguments.tokenizer))
    layers = SIZES[arguments.size]["num_hidden_layers"]
    target = random_model(config_of(arguments.size, vocabulary, layers), device)
    found = add_noise(target, arguments.agreement)
    save(target, arguments.tokenizer, arguments.folder / "target")
    del target
    draft = random_model(config_of(arguments.size, vocabulary, max(1, layers // DRAFT_PART)), device)
    silence(draft)
    save(draft, arguments.tokenizer, arguments.folder / "draft")
    on_gpu = device.type == "cuda"
    pair = {
        "model": {"target": str(arguments.folder / "target"), "dtype": "bfloat16", "max_context": CONTEXT},
        "target": {"resources_per_rank": {"num_gpus": 0.6 if on_gpu else 0}},
        "draft": {"model": str(arguments.folder / "draft"), "resources": {"num_gpus": 0.3 if on_gpu else 0}},
    }
    (arguments.folder / "pair.yaml").write_text(yaml.safe_dump(pair))
    print(f"{arguments.folder}: target and draft agree at {found:.3f} of the positions")


if __name__ == "__main__":
    main()
