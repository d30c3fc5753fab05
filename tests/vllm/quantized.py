"""Tiny checkpoints with quantized weights, in the layouts of the checkpoints that people serve.

Each has random weights and a fitted LM head: with the dequantized weights, the model continues a few prompts with
random but known texts, by a wide margin. Weights that an engine reads differently give other texts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.byte_tokenizer import byte_tokenizer

BLOCK = 128  # rows and columns of a block with one scale
GROUP = 128  # inputs of a 4-bit weight with one scale
MX_BLOCK = 32  # inputs of an MXFP4 weight with one scale
FP8_MAX = 448.0
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the nibbles of a word, the lowest first
HIDDEN = 256
PROMPTS = 4
PROMPT_TOKENS = 9
ANSWER_TOKENS = 24
MARGIN = 20.0  # logit of the right token; the others have logits near 0
RIDGE = 1e-4  # relative to the mean square of the states


@dataclass(frozen=True)
class Quantized:
    """Tensors that a checkpoint stores for a weight, by suffix, and the weight that they stand for."""

    stored: Mapping[str, Tensor]
    weight: Tensor


# ---------------------------------------------------------------- formats


def fp8_channels(weight: Tensor) -> Quantized:
    """Rounds (outputs, inputs) to FP8 with a scale per output, as llm-compressor's FP8_DYNAMIC scheme."""
    scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return Quantized({"weight": rounded, "weight_scale": scale}, rounded.float() * scale)


def fp8_blocks(weight: Tensor) -> Quantized:
    """Rounds (outputs, inputs) to FP8 with a scale per 128 x 128 block, as DeepSeek-V3 (`inference/kernel.py`)."""
    outputs, inputs = weight.shape
    blocks = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    wide = scale[:, None, :, None]
    rounded = (blocks / wide).to(torch.float8_e4m3fn)
    stored = {"weight": rounded.view(outputs, inputs), "weight_scale_inv": scale}
    return Quantized(stored, (rounded.float() * wide).view(outputs, inputs))


def awq(weight: Tensor) -> Quantized:
    """Rounds (outputs, inputs) to 4 bits with a zero point per group; AutoAWQ's `WQLinear_GEMM` packs 8 outputs."""
    groups = weight.T.view(-1, GROUP, weight.shape[0])  # (groups, inputs, outputs)
    low, high = groups.amin(dim=1).clamp(max=0), groups.amax(dim=1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15).int()
    wide = scale.float()[:, None]
    levels = ((groups / wide).round().int() + zero[:, None]).clamp(0, 15)
    stored = {
        "qweight": _packed(_awq_ordered(levels.flatten(0, 1)), dim=1),
        "qzeros": _packed(_awq_ordered(zero), dim=1),
        "scales": scale,
    }
    return Quantized(stored, ((levels - zero[:, None]) * wide).flatten(0, 1).T)


def gptq(weight: Tensor) -> Quantized:
    """Rounds (outputs, inputs) to 4 bits around level 8; AutoGPTQ's `QuantLinear` packs 8 inputs and zeros less one."""
    groups = weight.T.view(-1, GROUP, weight.shape[0])  # (groups, inputs, outputs)
    scale = (groups.abs().amax(dim=1) / 7).half()
    wide = scale.float()[:, None]
    levels = ((groups / wide).round().int() + 8).clamp(0, 15)
    stored = {
        "qweight": _packed(levels.flatten(0, 1), dim=0),
        "qzeros": _packed(torch.full_like(scale, 8 - 1, dtype=torch.int32), dim=1),
        "scales": scale,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return Quantized(stored, ((levels - 8) * wide).flatten(0, 1).T)


def mxfp4(weight: Tensor) -> Quantized:
    """Rounds (..., inputs) to FP4 with a power of two per 32 inputs (OCP Microscaling), as gpt-oss stores experts.

    A byte holds two inputs, the first in its low bits; a scale of s stands for 2^(s - 127).
    """
    blocks = weight.unflatten(-1, (-1, MX_BLOCK))
    exponent = blocks.abs().amax(dim=-1).clamp(min=1e-9).log2().floor() - 2  # 6 is the largest value, 1.5 * 2^2
    scaled = blocks / exponent.exp2()[..., None]
    magnitude = (scaled.abs()[..., None] - FP4).abs().argmin(dim=-1)
    nibbles = magnitude + 8 * (scaled < 0)
    stored = {
        "blocks": (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).to(torch.uint8),
        "scales": (exponent + 127).to(torch.uint8),
    }
    rounded = FP4[magnitude] * torch.where(scaled < 0, -1.0, 1.0) * exponent.exp2()[..., None]
    return Quantized(stored, rounded.flatten(-2))


def _awq_ordered(levels: Tensor) -> Tensor:
    """Reorders each 8 columns as AWQ packs them."""
    return levels.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)


def _packed(levels: Tensor, dim: int) -> Tensor:
    """Packs each 8 levels along `dim` into an int32, the first in the lowest bits."""
    words = levels.movedim(dim, -1).unflatten(-1, (-1, 8)).long()
    packed = (words << (4 * torch.arange(8))).sum(dim=-1)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Format:
    """Storage of quantized weights in one kind of checkpoint, with the `quantization_config` of its config.json."""

    quantize: Callable[[Tensor], Quantized]
    section: Mapping[str, Any]
    tokens: int = 12  # distinct tokens of the texts; the fewer, the more answers depend on the weights, and on rounding


FLOAT8: Mapping[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: Mapping[str, Format] = {
    "fp8_channels": Format(
        fp8_channels,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
                }
            },
        },
    ),
    "fp8_blocks": Format(
        fp8_blocks,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "awq": Format(awq, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}),
    "gptq": Format(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
    ),
    "mxfp4": Format(
        mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        tokens=4,
    ),
}


def texts(kind: str) -> dict[str, list[int]]:
    """Returns prompts with their answers, by session."""
    chooser = torch.Generator().manual_seed(7)
    size = (PROMPT_TOKENS + ANSWER_TOKENS,)
    last = 65 + FORMATS[kind].tokens
    return {f"greedy-{index}": torch.randint(65, last, size, generator=chooser).tolist() for index in range(PROMPTS)}


@torch.inference_mode()
def write_checkpoint(kind: str, folder: Path) -> Path:
    """Writes a checkpoint of one of `FORMATS`, with a tokenizer."""
    model = _gpt_oss() if kind == "mxfp4" else _llama()
    replaced = {}
    for name, weight in list(model.named_parameters()):
        if _is_quantized(name, kind):
            weight.mul_(_factors(weight.shape))
            quantized = _of_experts(weight) if kind == "mxfp4" else FORMATS[kind].quantize(weight.float())
            weight.copy_(quantized.weight)
            separator = "_" if kind == "mxfp4" else "."
            stem = name if kind == "mxfp4" else name.removesuffix(".weight")
            replaced[name] = {f"{stem}{separator}{part}": tensor for part, tensor in quantized.stored.items()}
        else:
            weight.copy_(weight.bfloat16())
    model.lm_head.weight.copy_(_fitted_head(model, kind).bfloat16())
    model.config.quantization_config = dict(FORMATS[kind].section)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    stored = {
        part: tensor.contiguous()
        for name, weight in model.named_parameters()
        for part, tensor in replaced.get(name, {name: weight.bfloat16()}).items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    return folder


def _factors(shape: torch.Size) -> Tensor:
    """Returns random factors of rows and blocks, which make scales differ, so that misplaced scales are noticed."""
    *outer, rows, columns = shape
    blocks = torch.randn(*outer, rows // BLOCK, columns // BLOCK)
    blocks = blocks.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return (0.5 * (blocks + torch.randn(*outer, rows, 1))).exp2()


def _is_quantized(name: str, kind: str) -> bool:
    if kind == "mxfp4":
        return name.endswith((".gate_up_proj", ".down_proj"))
    return name.endswith("_proj.weight")


def _of_experts(weight: Tensor) -> Quantized:
    """Quantizes (experts, inputs, outputs), which a checkpoint stores as (experts, outputs, inputs)."""
    quantized = mxfp4(weight.transpose(1, 2))
    return Quantized(quantized.stored, quantized.weight.transpose(1, 2))


SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
"""Settings common to both models."""


def _llama() -> Any:
    """Returns a model whose layers two ranks can split into whole blocks and groups."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, intermediate_size=256, head_dim=128, max_position_embeddings=512)
    ).eval()


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            intermediate_size=128,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=4,  # all: rounding may change which of two nearly tied experts is chosen
            sliding_window=16,
            pad_token_id=257,
        )
    ).eval()


def _fitted_head(model: Any, kind: str) -> Tensor:
    """Returns the LM head, (vocabulary, hidden), that continues each prompt with its answer.

    There are fewer places than hidden elements, so ridge regression finds a head that is right at all of them. With FP8
    weights, it is right with and without rounded inputs of linear layers, since vLLM's kernels differ in this.
    """
    tokens = torch.tensor(list(texts(kind).values()))
    states = [_states(model, tokens)]
    if kind.startswith("fp8"):
        layers = [layer for name, layer in model.named_modules() if name.endswith("_proj")]
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0]),)) for layer in layers]
        states.append(_states(model, tokens))
        for hook in hooks:
            hook.remove()
    read = torch.cat(states)
    assert len(read) < read.shape[1], "too many places for one head"
    answers = tokens[:, PROMPT_TOKENS:].flatten().repeat(len(states))
    logits = MARGIN * torch.nn.functional.one_hot(answers, model.config.vocab_size).double()
    gram = read @ read.T
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(read), dtype=torch.float64)
    return (read.T @ torch.linalg.solve(gram + ridge, logits)).T.float()


def _states(model: Any, tokens: Tensor) -> Tensor:
    """Returns the final hidden states before each token of the answers, (places, hidden)."""
    states: Tensor = model.model(input_ids=tokens).last_hidden_state
    return states[:, PROMPT_TOKENS - 1 : -1].flatten(0, 1).double()


def _rounded(inputs: Tensor) -> Tensor:
    """Rounds inputs to FP8 with a scale per token."""
    scale = inputs.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    return (inputs / scale).to(torch.float8_e4m3fn).float() * scale
