"""A model's own code is captured only if its operations do not depend on values."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM

from actors.attention.padded import PaddedSdpa
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, recording_on
from actors.models.decoder import ModelDecoder, decoder_for
from tests.unit.actors.tiny_models import MODELS, SIZES, twins

GPU = torch.device("cuda")
BUCKETS = Buckets((1, 16), rows=4, pages=4)
NUMBERS = (1, 16)  # of tokens


def lifted_to(device: str) -> Tensor:
    """Lifts a tensor on a device, as `torch.tensor` does on a GPU."""
    lifted: Tensor = torch.ops.aten.lift_fresh(torch.empty((), device=device))
    return lifted


def raising(error: Exception) -> Tensor:
    raise error


def a_decoder(change: Any) -> ModelDecoder:
    """Returns a decoder of Gemma 3 whose first MLP also applies `change`."""
    model = MODELS["gemma3"]()
    mlp = model.model.layers[0].mlp
    plain = mlp.forward

    def forward(x: Tensor) -> Tensor:
        return plain(change(x))

    mlp.forward = forward
    return ModelDecoder(model)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_code_without_reads_can_be_captured_and_stays_as_it_was(name):
    model, twin = twins(MODELS[name], seed=1)
    expected = ModelRunner(model, 4, 4).forward([InputRow((5, 6, 7), 0, 3, (0,))])
    decoder = decoder_for(twin)
    assert decoder.capture_fault(NUMBERS) == ""
    found = ModelRunner(twin, 4, 4, decoder=decoder).forward([InputRow((5, 6, 7), 0, 3, (0,))])
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x if bool(x.isfinite().all()) else x * 0, "_local_scalar_dense"),
        (lambda x: x * len(x.nonzero()), "nonzero"),
        (lambda x: torch.empty_like(x, device="meta").copy_(x), "copies between devices"),
        (lambda x: (x, lifted_to("meta"))[0], "copies between devices"),
        (lambda x: x.index_put((x > 0,), x.new_zeros(())), "masked elements"),
        (lambda x: raising(ValueError("no values")), "ValueError: no values"),
    ],
)
def test_code_that_reads_values_or_copies_to_another_device_cannot(change, reason):
    assert reason in a_decoder(change).capture_fault(NUMBERS)


def test_a_buffer_that_the_code_replaces_keeps_its_values():
    """CTRL converts its positions to the dtype of the embeddings in each forward."""
    model = MODELS["gemma3"]()
    mlp = model.model.layers[0].mlp
    mlp.register_buffer("scale", torch.tensor(2.0))
    plain = mlp.forward

    def forward(x: Tensor) -> Tensor:
        mlp.scale = mlp.scale.to(torch.float64)
        mlp.calls = getattr(mlp, "calls", 0) + 1
        return plain(x * mlp.scale.float())

    mlp.forward = forward
    assert ModelDecoder(model).capture_fault(NUMBERS) == ""
    assert type(mlp.scale) is Tensor
    assert float(mlp.scale) == 2.0
    assert not hasattr(mlp, "calls")


def test_code_that_reads_values_only_for_some_numbers_of_tokens_cannot():
    decoder = a_decoder(lambda x: x * x.sum().item() if x.shape[1] > 8 else x)
    assert "_local_scalar_dense" in decoder.capture_fault(NUMBERS)


def test_recurrent_layers_cannot_be_captured():
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"])
    assert "recurrent" in decoder_for(Lfm2ForCausalLM(config)).capture_fault(NUMBERS)


def test_no_step_is_captured_on_a_gpu_if_the_model_or_its_attention_cannot_be(caplog):
    decoder = a_decoder(lambda x: x * x.sum().item())
    assert recording_on(GPU, PaddedSdpa(), decoder, BUCKETS) is None
    assert recording_on(GPU, SdpaGather(), decoder_for(MODELS["llama"]()), BUCKETS) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert "_local_scalar_dense" in first
    assert "gathered cannot be captured" in second


def test_a_cpu_captures_nothing(caplog):
    assert recording_on(torch.device("cpu"), PaddedSdpa(), decoder_for(MODELS["llama"]()), BUCKETS) is None
    assert not caplog.records
