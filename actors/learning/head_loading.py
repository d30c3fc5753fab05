"""Loads published heads for training."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.compute.linear import projection
from actors.drafters.heads.eagle.config import (
    EagleKind,
    EagleOverrides,
    OutputNorm,
    WeightSource,
    canonical,
    overrides_of,
    resolve,
)
from actors.drafters.heads.eagle.weights import EagleReader
from actors.drafters.heads.files import HEAD, HeadFiles, folder_to_borrow_from, head_folder, read_head
from actors.drafters.heads.medusa import borrowed_tensors_of, names_of, resolve_medusa, without_base_model
from actors.drafters.heads.mlp_speculator import ALIASES, resolve_mlp_speculator
from actors.drafters.heads.projection import unchanged
from actors.drafters.heads.rope import rotary_of, target_shape
from actors.drafters.heads.weight_reader import borrowed_tensors
from actors.drafters.registry import states_format, states_needed
from actors.learning.eagle_layer import EagleLayer, LayerSizes, RootMeanSquare
from actors.learning.eagle_network import EagleNetwork
from actors.learning.head_trainee import HeadLearning, HeadNetwork, LoadedHead
from actors.learning.last_state_networks import MedusaNetwork, MlpSpeculatorNetwork
from actors.learning.trainable import fingerprint_of
from actors.models.checkpoint import local_folder
from cluster.config import DraftPool
from cluster.errors import ModelError


def states_kind(draft: DraftPool, target: Path) -> str:
    """Names the rows of hidden states in examples: their format, the layers, and the head, which may project them.

    Rows of another kind cannot train the configured head. `target` is a folder.
    """
    needed = states_needed(draft, target)
    layout = states_format(draft, target)
    assert needed is not None, "a head reads states"
    assert layout is not None, "a head reads states"
    layers = ",".join(map(str, needed.layers))
    return f"{layout.width} {layout.dtype.name.lower()} {layers} {fingerprint_of(head_folder(draft))}"


def head_learning(draft: DraftPool, target: str) -> HeadLearning:
    """Describes how the head of a deployment learns; `target` is a folder or a Hugging Face id.

    Raises ModelError if the head does not fit the target.
    """
    described = local_folder(target, with_weights=False)
    needed = states_needed(draft, described)
    layout = states_format(draft, described)
    assert needed is not None, "a head reads states"
    assert layout is not None, "a head reads states"
    stored = read_head(head_folder(draft))
    borrowed: list[tuple[str, ...]] = []
    load: Callable[..., LoadedHead] = load_mlp_speculator
    if draft.model_method == "medusa":
        borrowed, load = borrowed_tensors_of(without_base_model(stored)), load_medusa
    elif draft.model_method == "eagle":
        borrowed = borrowed_tensors(canonical(stored).tensors)
        is_projected = draft.states.projects_at_target(needed)
        load = partial(load_eagle, overrides=overrides_of(draft.eagle), is_projected=is_projected)
    folder = folder_to_borrow_from(target, borrowed)
    return HeadLearning(states_kind(draft, described), layout, partial(load, target=folder))


def load_eagle(folder: Path, target: Path, overrides: EagleOverrides, *, is_projected: bool) -> LoadedHead:
    """Loads an EAGLE-3 head; `target` is the folder of its target, with the tensors that the head borrows.

    With `is_projected`, kept rows have been projected by the target. Raises ModelError for a head of another kind.
    """
    stored = read_head(folder)
    files = canonical(stored)
    config = resolve(files, target_shape(target), overrides)
    if config.kind is not EagleKind.EAGLE3 or config.mask_token is not None:
        kind = "P-EAGLE" if config.kind is EagleKind.EAGLE3 else config.kind.value
        raise ModelError(f"{folder} holds a head of kind {kind}, which does not learn; use an EAGLE-3 head")
    reader = EagleReader(files, target, config, torch.float32, torch.device("cpu"), projection)
    embedding = reader.own_or_borrowed("embed_tokens.weight", config.vocabulary)
    is_tied = config.lm_head is WeightSource.EMBEDDING
    network = EagleNetwork(
        [_layer(files, index, config) for index in range(config.layers)],
        None
        if config.output_norm is OutputNorm.NOTHING
        else RootMeanSquare(files.tensor("norm.weight").float(), config.eps),
        embedding if is_tied else reader.own_or_borrowed("lm_head.weight", config.columns),
        embedding,
        rotary_of(config.rope, config.head_dim),
        norm_before_residual=config.norm_before_residual,
        norms_recycled=config.output_norm is OutputNorm.BOTH,
    )
    network.lm_head.requires_grad_(config.lm_head is WeightSource.HEAD)  # a borrowed one stays the target's
    names = _stored_names(stored, files)
    trained = {name: "lm_head.weight" if name == "lm_head" else name for name, _ in network.named_parameters()}
    return LoadedHead(
        network=network,
        files=stored,
        names={name: names[tensor] for name, tensor in trained.items() if tensor in names},
        token_ids=reader.draft_columns(None).token_ids,
        vocabulary=config.vocabulary,
        max_positions=config.max_positions,
        project=reader.row_projection() if config.projects and not is_projected else unchanged,
    )


def load_medusa(folder: Path, target: Path) -> LoadedHead:
    """Loads Medusa heads; `target` is the folder of their target, whose LM head they may borrow.

    Raises ModelError if they do not fit the target.
    """
    stored = read_head(folder)
    files = without_base_model(stored)
    config = resolve_medusa(files, target_shape(target))
    names = names_of(files)
    weights = _Weights(files)

    def block(head: int, index: int) -> nn.Linear:
        name = names.block(head, index)
        layer = nn.Linear(config.hidden, config.hidden, bias=f"{name}.bias" in files.tensors)
        layer.weight = weights.parameter(f"{name}.weight", config.hidden, config.hidden)
        if f"{name}.bias" in files.tensors:
            layer.bias = weights.parameter(f"{name}.bias", config.hidden)
        return layer

    @cache
    def lm_head(name: str | None) -> nn.Parameter:
        shape = (config.columns, config.hidden)
        if name is None:
            return nn.Parameter(files.borrowed(target, HEAD, shape).float(), requires_grad=False)
        return weights.parameter(name, *shape)

    network = MedusaNetwork(
        [[block(head, index) for index in range(config.blocks)] for head in range(config.heads)],
        [lm_head(names.lm_head(head)) for head in range(config.heads)],
    )
    ids = files.tensors.get("token_map", torch.arange(config.columns)).long()
    return weights.loaded_head(network, stored, ids, config.vocabulary, config.heads)


def load_mlp_speculator(folder: Path, target: Path) -> LoadedHead:
    """Loads an MLPSpeculator; `target` is the folder of its target. Its embeddings are not trained.

    Raises ModelError if it does not fit the target.
    """
    stored = read_head(folder)
    files = stored.renamed(ALIASES)
    config = resolve_mlp_speculator(files, target_shape(target))
    weights = _Weights(files)
    shape = (config.columns, config.inner)
    steps = range(config.steps)
    one_of = [config.weights_of(step) for step in steps]
    network = MlpSpeculatorNetwork(
        [weights.parameter(f"emb.{one}.weight", *shape) for one in one_of],
        [
            weights.parameter(
                f"proj.{config.projection_of(step)}.weight", config.inner, config.inner if step else config.hidden
            )
            for step in steps
        ],
        [
            (weights.parameter(f"ln.{one}.weight", config.inner), weights.parameter(f"ln.{one}.bias", config.inner))
            for one in one_of
        ],
        [weights.parameter(f"head.{one}.weight", *shape) for one in one_of],
        scales_input=config.scales_input,
    )
    network.emb.requires_grad_(False)
    return weights.loaded_head(network, stored, torch.arange(config.columns), config.columns, config.steps)


class _Weights:
    """Trainable copies of a head's tensors. Parts that share a tensor share its parameter."""

    def __init__(self, files: HeadFiles) -> None:
        self._files = files
        self._parameters: dict[str, nn.Parameter] = {}

    def parameter(self, name: str, *shape: int) -> nn.Parameter:
        """Returns a tensor's parameter. Raises ModelError if it is missing or has the wrong shape."""
        tensor = self._files.tensor(name, shape)
        if name not in self._parameters:
            self._parameters[name] = nn.Parameter(tensor.float().clone())
        return self._parameters[name]

    def loaded_head(
        self, network: HeadNetwork, stored: HeadFiles, ids: Tensor, vocabulary: int, steps: int
    ) -> LoadedHead:
        """Returns the head for training.

        `stored` has the checkpoint's tensor names. Other tensors of a checkpoint that merges head and target are left
        out.
        """
        names = _stored_names(stored, self._files)
        stored_as = {id(parameter): names[name] for name, parameter in self._parameters.items()}
        return LoadedHead(
            network=network,
            files=replace(stored, tensors={name: stored.tensors[name] for name in names.values()}),
            names={name: stored_as[id(each)] for name, each in network.named_parameters() if id(each) in stored_as},
            token_ids=ids,
            vocabulary=vocabulary,
            steps=steps,
        )


def _stored_names(stored: HeadFiles, files: HeadFiles) -> dict[str, str]:
    """Returns the stored name of each tensor in `files`, which are the same tensors under other names."""
    stored_as = {id(tensor): name for name, tensor in stored.tensors.items()}
    return {name: stored_as[id(tensor)] for name, tensor in files.tensors.items()}


def _layer(files: HeadFiles, index: int, sizes: LayerSizes) -> EagleLayer:
    layer = EagleLayer(sizes, is_first=index == 0)
    prefix = f"layers.{index}."
    tensors: dict[str, Tensor] = {
        name.removeprefix(prefix): tensor.float() for name, tensor in files.tensors.items() if name.startswith(prefix)
    }
    layer.load(tensors)
    if not index and "hidden_norm.weight" not in tensors:
        layer.hidden_norm = nn.Identity()
    return layer
