"""Drafting methods download only the files of a checkpoint that they need."""

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.drafters.registry import DraftSetup, create_method, states_format
from actors.models import checkpoint as checkpoints
from actors.models.checkpoint import INDEX, first_of_each, folder_with, of_layers
from actors.models.layer_subset import load_layers
from cluster.config import DraftPool
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, altered, checkpoint

ID = "org/target"
SHARDS = {"embedding": "embed_tokens", "head": "lm_head", "norm": "model.norm"}


class Hub:
    """The fixtures' target on a hub, a file for each layer and for each tensor beside them, and what was fetched."""

    def __init__(self, origin: Path, cache: Path) -> None:
        self._origin = origin
        self._cache = cache
        self.fetched: set[str] = set()

    def snapshot_download(self, name: str, allow_patterns: Sequence[str]) -> str:
        assert name == ID
        for path in self._origin.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, self._cache / path.name)
                if path.suffix == ".safetensors":
                    self.fetched.add(path.stem)
        return str(self._cache)


def shard_of(tensor: str) -> str:
    if ".layers." in tensor:
        return f"layer{tensor.split('.layers.')[1].split('.')[0]}"
    return next(shard for shard, part in SHARDS.items() if part in tensor)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    origin = tmp_path / "origin"
    cache = tmp_path / "cache"
    origin.mkdir()
    cache.mkdir()
    shutil.copy(TARGET / "config.json", origin)
    tensors = load_file(TARGET / "model.safetensors")
    places = {name: shard_of(name) for name in tensors}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, origin / f"{shard}.safetensors")
    files = {name: f"{shard}.safetensors" for name, shard in places.items()}
    (origin / INDEX).write_text(json.dumps({"weight_map": files}))
    found = Hub(origin, cache)
    monkeypatch.setattr(checkpoints, "snapshot_download", found.snapshot_download)
    return found


def created(method: Any, model: Path | None, **options: Any) -> None:
    draft = DraftPool(method=method, model=None if model is None else str(model), **options)
    tokens = {token: str(token) for token in range(96)}
    create_method(draft, DraftSetup("float32", 64, 4, tokens, ID, states_format(draft, TARGET)))


def test_a_head_with_an_embedding_of_the_target_fetches_that_alone(hub: Hub) -> None:
    created("eagle", checkpoint("eagle3"))
    assert hub.fetched == {"embedding"}


def test_a_head_that_has_neither_fetches_embedding_and_head(hub: Hub) -> None:
    created("dflash", checkpoint("dflash"))
    assert hub.fetched == {"embedding", "head"}


def test_a_head_that_has_all_fetches_nothing(hub: Hub) -> None:
    created("eagle", checkpoint("eagle3_speculators"))
    assert hub.fetched == set()


def with_borrowed_lm_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Medusa heads in vLLM's layout, which share the target's LM head."""
    blocks = {name: tensor for name, tensor in tensors.items() if ".linear." in name}
    return {"blocks." + name.replace("0.linear", "layers.0"): tensor for name, tensor in blocks.items()}


def test_medusa_heads_without_an_lm_head_fetch_it_alone(hub: Hub, tmp_path: Path) -> None:
    folder = altered(tmp_path, "medusa", with_borrowed_lm_head, original_lm_head=True)
    created("medusa", folder)
    assert hub.fetched == {"head"}


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_heads_with_an_lm_head_of_their_own_fetch_nothing(hub: Hub, method: str) -> None:
    created(method, checkpoint(method))
    assert hub.fetched == set()


def test_layers_of_the_target_are_fetched_without_the_others(hub: Hub) -> None:
    created("layer_skip", None, layer_skip={"layers": [0, 3]})
    assert hub.fetched == {"layer0", "layer3", "embedding", "head", "norm"}


def test_what_was_fetched_is_what_a_whole_checkpoint_has(hub: Hub) -> None:
    layers = (1, 2)
    found = load_layers(folder_with(ID, of_layers(layers)), layers, "float32", torch.device("cpu"))
    whole = load_layers(TARGET, layers, "float32", torch.device("cpu"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_a_checkpoint_in_one_file_is_fetched_whole(hub: Hub) -> None:
    (hub._origin / INDEX).unlink()
    for path in hub._origin.glob("*.safetensors"):
        path.unlink()
    shutil.copy(TARGET / "model.safetensors", hub._origin)
    folder_with(ID, first_of_each([("model.embed_tokens.weight",)]))
    assert hub.fetched == {"model"}


def test_a_local_folder_is_as_it_is(hub: Hub) -> None:
    assert folder_with(str(TARGET), of_layers([0])) == TARGET
    assert hub.fetched == set()


def test_names_are_chosen_by_layer_and_by_preference() -> None:
    names = ["model.layers.1.a", "model.layers.10.a", "layers.2.a", "model.norm", "embed"]
    assert of_layers([1, 2])(names) == ["model.layers.1.a", "layers.2.a", "model.norm", "embed"]
    assert first_of_each([("lm_head", "embed"), ("embed",), ("absent",)])(names) == ["embed", "embed"]
