"""Tests loading of checkpoints in the format of compressed-tensors, written by that library."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.attention.batch import exact_batch
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import attention_shape
from actors.compute.kv_cache import InputRow, PagedCache
from actors.models.checkpoint import load_model
from actors.models.decoder import decoder_for

CPU = torch.device("cpu")
TOKENS = tuple(range(1, 20))
LARGEST = {"W4A16": 7, "W8A8": 127, "FP8_DYNAMIC": 448}  # magnitude of a weight's code


def write(folder: Path, preset: str) -> None:
    """Writes a small Llama; all of its linear layers except the LM head are quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group": scheme}, ignore=["lm_head"], quantization_status="frozen")
    )
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            groups = layer.weight.float().view(*layer.weight_scale.shape, -1)
            layer.weight_scale.data.copy_(groups.abs().amax(-1) / LARGEST[preset])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def size(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("preset", LARGEST)
@torch.inference_mode()
def test_logits_are_those_of_transformers_and_weights_have_their_final_size(tmp_path: Path, preset: str) -> None:
    """compressed-tensors expands the weights in the first forward, but memory is planned right after loading."""
    write(tmp_path, preset)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(torch.tensor([TOKENS])).logits[0]
    model = load_model(tmp_path, "bfloat16", CPU)
    before = size(model)
    cache = PagedCache(2, 16, attention_shape(model, 16).sizes, torch.bfloat16, CPU)
    row = InputRow(TOKENS, 0, len(TOKENS), (0, 1))
    found = decoder_for(model)(exact_batch([row], cache, SdpaGather())).logits
    assert torch.equal(found, expected.to(found.dtype))
    assert size(model) == before
