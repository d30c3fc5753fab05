"""Loads published heads for training."""

from functools import partial
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
from actors.drafters.heads.files import HeadFiles, folder_to_borrow_from, head_folder, read_head
from actors.drafters.heads.projection import unchanged
from actors.drafters.heads.rope import rotary_of, target_shape
from actors.drafters.heads.weight_reader import borrowed_tensors
from actors.drafters.registry import states_format, states_kind, states_needed
from actors.learning.eagle_layer import EagleLayer, LayerSizes, RootMeanSquare
from actors.learning.eagle_network import EagleNetwork
from actors.learning.head_trainee import HeadLearning, LoadedHead
from actors.models.checkpoint import local_folder
from cluster.config import DraftPool
from cluster.errors import ModelError


def head_learning(draft: DraftPool, target: str) -> HeadLearning:
    """Describes how the head of a deployment learns; `target` is a folder or a Hugging Face id.

    Raises ModelError if the head does not fit the target.
    """
    described = local_folder(target, with_weights=False)
    needed = states_needed(draft, described)
    layout = states_format(draft, described)
    assert needed is not None, "a head reads states"
    assert layout is not None, "a head reads states"
    stored = canonical(read_head(head_folder(draft)))
    folder = folder_to_borrow_from(target, borrowed_tensors(stored.tensors))
    is_projected = draft.states.projects_at_target(needed)
    load = partial(load_eagle, target=folder, overrides=overrides_of(draft.eagle), is_projected=is_projected)
    return HeadLearning(states_kind(draft, layout), layout, load)


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
        rotary_of(config.rope, config.head_dim, config.max_positions),
        norm_before_residual=config.norm_before_residual,
        norms_recycled=config.output_norm is OutputNorm.BOTH,
    )
    network.lm_head.requires_grad_(config.lm_head is WeightSource.HEAD)  # a borrowed one stays the target's
    stored_as = {id(tensor): name for name, tensor in stored.tensors.items()}
    names = {name: stored_as[id(tensor)] for name, tensor in files.tensors.items()}
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
