"""Some layers of a checkpoint as a model: against transformers' own, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM, PreTrainedModel

from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.layer_subset import check_layers, load_layers
from cluster.errors import ModelError
from tests.unit.actors.tiny_models import LAYERS, SIZES, WINDOW, jittered

HEADS = Path(__file__).parents[3] / "data" / "heads"
TARGET = HEADS / "target"
CASE = np.load(HEADS / "layer_skip" / "case.npz")
PROMPT = tuple(CASE["input_ids"].tolist())
CPU = torch.device("cpu")
NEAR = {"rtol": 0.0, "atol": 1e-4}


def logits(model: PreTrainedModel, tokens: tuple[int, ...] = PROMPT) -> Tensor:
    """Returns the logits of every place, through the pages of a runner."""
    row = InputRow(tokens, 0, len(tokens), tuple(range(8)))
    return ModelRunner(model, pages=8, page_size=4).forward([row]).logits


def first_layers(count: int) -> PreTrainedModel:
    return load_layers(TARGET, range(count), "float32", CPU)


def test_the_first_layers_say_what_the_reference_says() -> None:
    model = first_layers(int(CASE["exit_layer"]))
    torch.testing.assert_close(logits(model), torch.from_numpy(CASE["logits"]), **NEAR)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
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
    """Windows and full attention by turns: the second of three has none."""
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
    """Its other half need not even be there."""
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
def test_layers_that_there_are_not_are_refused(layers: tuple[int, ...], named: str) -> None:
    check_layers(TARGET, range(8))
    with pytest.raises(ModelError, match=f"has the layers 0 to 7, but.* {named}.*draft.layer_skip.layers"):
        check_layers(TARGET, layers)
