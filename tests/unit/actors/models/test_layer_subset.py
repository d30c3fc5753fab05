"""Tests models made of some layers of a checkpoint, and the context length of a configuration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    XLNetConfig,
)

from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.layer_subset import check_layers, context_length, load_layers, uses_rope
from cluster.errors import ModelError
from tests.unit.actors.tiny_models import LAYERS, SIZES, WINDOW, jittered

HEADS = Path(__file__).parents[3] / "data" / "heads"
TARGET = HEADS / "target"
CASE = np.load(HEADS / "layer_skip" / "case.npz")
PROMPT = tuple(CASE["input_ids"].tolist())
CPU = torch.device("cpu")
NEAR = {"rtol": 0.0, "atol": 1e-4}


def logits(model: PreTrainedModel, tokens: tuple[int, ...] = PROMPT) -> Tensor:
    """Returns the logits at every place, computed by a runner over pages."""
    row = InputRow(tokens, 0, len(tokens), tuple(range(8)))
    return ModelRunner(model, pages=8, page_size=4).forward([row]).logits


def first_layers(count: int) -> PreTrainedModel:
    return load_layers(TARGET, range(count), "float32", CPU)


def test_the_first_layers_compute_what_the_reference_computes() -> None:
    model = first_layers(int(CASE["exit_layer"]))
    torch.testing.assert_close(logits(model), torch.from_numpy(CASE["logits"]), **NEAR)
    with torch.no_grad():
        hidden = first_layers(int(CASE["exit_layer"])).model(torch.tensor([PROMPT])).last_hidden_state[0]
    torch.testing.assert_close(hidden, torch.from_numpy(CASE["hidden_normed"]), **NEAR)


@pytest.mark.parametrize("other", [-1, 1])
def test_one_layer_more_or_less_would_be_noticed(other: int) -> None:
    model = first_layers(int(CASE["exit_layer"]) + other)
    assert (logits(model) - torch.from_numpy(CASE["logits"])).abs().max() > 0.05


@torch.inference_mode()
def test_named_layers_are_those_of_the_whole_model_with_the_others_taken_out() -> None:
    layers = (0, 2, 3, 7)
    whole = LlamaForCausalLM.from_pretrained(TARGET)
    whole.model.layers = nn.ModuleList(whole.model.layers[layer] for layer in layers)
    expected = whole(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(load_layers(TARGET, layers, "float32", CPU)), expected, **NEAR)


@torch.inference_mode()
def test_a_layer_keeps_its_kind(tmp_path: Path) -> None:
    """Windows and full attention alternate; the second of three layers has no window."""
    config = Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=16)
    jittered(Gemma3ForCausalLM(config)).save_pretrained(tmp_path)
    model = load_layers(tmp_path, (1, 2), "float32", CPU)
    assert model.config.layer_types == LAYERS[1:]
    whole = Gemma3ForCausalLM.from_pretrained(tmp_path)
    whole.model.layers = nn.ModuleList(list(whole.model.layers)[1:])
    whole.config.layer_types = LAYERS[1:]
    whole.config.num_hidden_layers = 2
    expected = whole(torch.tensor([PROMPT]) % 64, use_cache=False).logits[0]
    found = logits(model, tuple(token % 64 for token in PROMPT))
    torch.testing.assert_close(found, expected, **NEAR)


def test_nothing_else_of_the_checkpoint_is_read(tmp_path: Path) -> None:
    """The other half of the checkpoint may be missing."""
    tensors = load_file(TARGET / "model.safetensors")
    (tmp_path / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    is_late = {key: any(f"layers.{layer}." in key for layer in range(3, 8)) for key in tensors}
    save_file({key: tensor for key, tensor in tensors.items() if not is_late[key]}, tmp_path / "first.safetensors")
    places = {key: "second.safetensors" if late else "first.safetensors" for key, late in is_late.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = load_layers(tmp_path, range(3), "float32", CPU)
    torch.testing.assert_close(logits(model), torch.from_numpy(CASE["logits"]), **NEAR)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.0"):
        load_layers(tmp_path, (3,), "float32", CPU)


@pytest.mark.parametrize(
    ("layers", "named"), [((0, 8), "layers 8 are"), ((2, 9), "layers 9 are"), ((), "layers none are")]
)
def test_nonexistent_layers_are_refused(layers: tuple[int, ...], named: str) -> None:
    check_layers(TARGET, range(8))
    with pytest.raises(ModelError, match=f"has the layers 0 to 7, but.* {named}.*draft.layer_skip.layers"):
        check_layers(TARGET, layers)


def test_layers_with_quantized_weights_are_refused(tmp_path: Path) -> None:
    LlamaConfig(quantization_config={"quant_method": "awq"}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"quantized with 'awq'.*use another draft\.method"):
        check_layers(tmp_path, (0,))


# ---------------------------------------------------------------- context length


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}


def llama(positions: int, **scaling: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **scaling})


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (4096, {"rope_type": "default"}, 4096),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
        (32768, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (131072, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (40960, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (163840, YARN | {"factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (64, YARN, 256),
        (4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),
        (
            131072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
    ],
    ids=["default", "linear", "qwen", "qwen-extended", "qwen3", "deepseek", "yarn-alone", "dynamic", "llama3"],
)
def test_scaling_extends_the_context_as_published_checkpoints_mean_it(
    positions: int, scaling: dict[str, Any], context: int
) -> None:
    assert context_length(llama(positions, **scaling)) == context


def test_the_older_spelling_of_a_scaling_counts_too() -> None:
    config = Qwen2Config(
        max_position_embeddings=32768,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert context_length(config) == 131072


def test_longrope_has_its_length_in_max_position_embeddings() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_type": "longrope", "rope_theta": 10000.0}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=factors,
    )
    assert context_length(config) == 131072


def test_layers_scaled_apart_count_as_the_shortest_of_them() -> None:
    """Gemma 3 scales only full attention, and max_position_embeddings is the extended length."""
    scaled = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert context_length(Gemma3TextConfig(max_position_embeddings=131072, rope_parameters=scaled)) == 131072


def test_a_model_without_rope_ignores_a_scaling_that_its_file_carries() -> None:
    config = GPT2Config(n_positions=64, rope_parameters={"rope_type": "linear", "factor": 4.0})
    assert not uses_rope(config)
    assert context_length(config) == 64


def test_a_model_without_positions_has_no_limit() -> None:
    assert context_length(BloomConfig()) is None
    assert context_length(XLNetConfig()) is None, "-1 means none"
