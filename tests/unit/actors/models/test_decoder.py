"""The lean decoder equals the model's own code with fewer operations, and replaces it only if equivalent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.attention.batch import exact_batch
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache
from actors.compute.linear import EightBitProjection
from actors.models.decoder import (
    Decoder,
    LlamaDecoder,
    MirroredNorm,
    ModelDecoder,
    PlainNorm,
    decoder_for,
    is_llama_kind,
)
from tests.unit.actors.tiny_models import MODELS, SIZES, tokens_of, twins

CACHED = dict.fromkeys(range(SIZES["num_hidden_layers"]), LayerSize(2, 8))
LLAMA_KIND = ["llama", "qwen2", "qwen3", "mistral"]
BFLOAT16_TOLERANCE = 0.03  # relative to the logits' norm; rounding errors of 8-bit significands add up
EIGHT_BIT_TOLERANCE = 0.06 if torch.cpu._is_vnni_supported() else 0.12  # without VNNI, rows have 7 bits


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_gets_its_decoder(name):
    model = MODELS[name]()
    assert is_llama_kind(model) == (name in LLAMA_KIND)
    assert type(decoder_for(model)) is (LlamaDecoder if name in LLAMA_KIND else ModelDecoder)


class Quantised(nn.Linear):
    """Linear layer whose weights need dequantization."""


def with_special_layer() -> PreTrainedModel:
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.layers[1].mlp.down_proj = Quantised(48, 32, bias=False)
    return model


class Other(LlamaForCausalLM):
    """Subclass with another name and unknown changes."""


def with_quantized_layer() -> LlamaForCausalLM:
    """Quantization libraries replace `nn.Linear` with classes that neither derive from it nor have a weight."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.quantization_config = {"quant_method": "awq"}
    model.model.layers[0].self_attn.q_proj = nn.Identity()
    return model


UNLIKE: dict[str, Callable[[], PreTrainedModel]] = {
    "another activation": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")),
    "a layer of its own kind": with_special_layer,
    "quantized weights": with_quantized_layer,
    "another class": lambda: Other(LlamaConfig(**SIZES)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unsupported_variants_fall_back_to_the_models_own_code(name):
    model = UNLIKE[name]()
    assert not is_llama_kind(model)
    assert type(decoder_for(model)) is ModelDecoder


def decode(decoder: Decoder, dtype: torch.dtype) -> Tensor:
    """Runs two steps over three sessions: prompts, then blocks and a single token."""
    cache = PagedCache(16, 4, CACHED, dtype, torch.device("cpu"))
    a = tokens_of(1, 14)
    b = tokens_of(2, 9)
    c = tokens_of(3, 11)
    at_a = (3, 9, 1, 12)
    at_b = (0, 14, 2)
    at_c = (5, 4, 8)
    prompts = [InputRow(a[:9], 0, 0, at_a), InputRow(b[:8], 0, 0, at_b), InputRow(c[:4], 0, 1, at_c)]
    further = [InputRow(a[9:], 9, 5, at_a), InputRow(b[8:], 8, 1, at_b), InputRow(c[4:], 4, 7, at_c)]
    attention = SdpaGather()
    with torch.inference_mode():
        return torch.cat([decoder(exact_batch(rows, cache, attention)).logits for rows in (prompts, further)])


def both(name: str, dtype: torch.dtype, seed: int = 5) -> tuple[PreTrainedModel, PreTrainedModel]:
    model, twin = twins(MODELS[name], seed)
    return model.to(dtype), twin.to(dtype)


@pytest.mark.parametrize("name", LLAMA_KIND)
def test_both_decoders_give_the_same_logits(name):
    model, twin = both(name, torch.float32)
    torch.testing.assert_close(
        decode(LlamaDecoder(model), torch.float32), decode(ModelDecoder(twin), torch.float32), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_the_logits_are_those_of_float32_but_for_rounding(name):
    """The error is about that of the model's own code in bfloat16, so the decoder adds none.

    Several models, because the error of one varies by half with the order of additions, which depends on the processor.
    """
    exact, ours, theirs = [], [], []
    for seed in range(6):
        model, _ = both(name, torch.float32, seed)
        exact.append(decode(decoder_for(model), torch.float32))
        rounded, own = both(name, torch.bfloat16, seed)
        ours.append(decode(decoder_for(rounded), torch.bfloat16) - exact[-1])
        theirs.append(decode(ModelDecoder(own), torch.bfloat16) - exact[-1])
    error = torch.cat(ours).norm()
    assert error < BFLOAT16_TOLERANCE * torch.cat(exact).norm()
    assert error < 1.2 * torch.cat(theirs).norm()


@pytest.mark.parametrize("name", MODELS)
def test_in_eight_bits_the_logits_are_those_of_float32_but_for_rounding(name):
    exact, twin = both(name, torch.float32)
    rounded = decode(decoder_for(twin, EightBitProjection), torch.float32)
    expected = decode(decoder_for(exact), torch.float32)
    assert 0 < (rounded - expected).norm() < EIGHT_BIT_TOLERANCE * expected.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_both_norms_are_the_root_mean_square_norm(dtype, tolerance):
    x = (3 * torch.randn(5, 4, 32) + 1).to(dtype)
    weight = torch.randn(32).to(dtype)
    exact = nn.functional.rms_norm(x.double(), (32,), weight.double(), 1e-5)
    for norm in (PlainNorm(weight, 1e-5), MirroredNorm(weight, 1e-5)):
        assert torch.allclose(norm(x).double(), exact, rtol=2 * tolerance, atol=tolerance)
