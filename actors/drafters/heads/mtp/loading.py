"""Loads a target's multi-token prediction module as an EAGLE head with two more norms, which it computes like.

DeepSeek-V3: arXiv 2412.19437, section 2.2. The module is fed a token's embedding and the target's final state before
it, each normed separately. One decoder layer, a norm and the target's LM head then predict the next token. For further
tokens the module's own normed output takes the place of the target's state.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from actors.compute.linear import Product, projection
from actors.drafters.heads.eagle.config import EagleConfig, EagleKind
from actors.drafters.heads.eagle.loading import AS_CONFIGURED, EagleHead, head_of
from actors.drafters.heads.eagle.resolution import resolve
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles
from actors.drafters.heads.mtp.names import MtpLayout, check_layer, layout_in
from actors.drafters.heads.target_shape import TargetShape, target_shape
from actors.models.checkpoint import local_folder
from actors.models.config_reader import read_config
from actors.models.hub_files import first_of_each, folder_with
from actors.models.weights import read_tensors, stored_tensors
from cluster.errors import ModelError
from protos.states import StatesNeeded


def mtp_states(target: Path) -> StatesNeeded:
    """Returns the state that the target's module reads: the final one, after the last norm."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden)


def folder_with_mtp(target: str) -> Path:
    """Returns the target's folder, fetching only the module and the tensors that it shares with the target.

    `target` is a folder or a Hugging Face id. Raises ModelError as `load_mtp` does.
    """
    layers = target_shape(local_folder(target, with_weights=False)).layers

    def wanted(names: Collection[str]) -> list[str]:
        layout = layout_in(names, layers, target)
        return [*(name for name in names if name.startswith(layout.prefix)), *first_of_each((EMBEDDING, HEAD))(names)]

    return folder_with(target, wanted)


def load_mtp(
    target: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> EagleHead:
    """Loads the first module of the target in this folder, and the target's tensors that it shares.

    Raises ModelError if there is no module, or its kind is not supported.
    """
    shape = target_shape(target)
    layout = layout_in(stored_tensors(target, partial=True), shape.layers, str(target))
    files = module_files(target, layout, _read(target, layout))
    config = replace(resolve_mtp(files, shape), hides_first=layout.hides_first)
    return head_of(files, config, target, dtype, device, proposable, product)


def resolve_mtp(files: HeadFiles, target: TargetShape) -> EagleConfig:
    """Resolves a module with tensors in EAGLE names. Raises ModelError if its kind is not supported."""
    check_layer(files.tensors, str(files.folder))
    window = files.config.get("sliding_window")
    if window and files.config.get("use_sliding_window", True):
        raise ModelError(f"the target in {files.folder} attends to a window of {window}, which is not supported in MTP")
    return replace(resolve(files, target, AS_CONFIGURED), kind=EagleKind.MTP)


def module_files(target: Path, layout: MtpLayout, stored: Mapping[str, Tensor]) -> HeadFiles:
    """Returns the module's tensors under EAGLE names, with the target's configuration reduced to one layer."""
    tensors = {layout.own_name(name): tensor for name, tensor in stored.items() if name.startswith(layout.prefix)}
    if layout.state_first:
        state, embedding = tensors["fc.weight"].chunk(2, dim=-1)
        tensors["fc.weight"] = torch.cat((embedding, state), dim=-1)
    config = read_config(target).get_text_config().to_dict()
    return HeadFiles(target, config | {"num_hidden_layers": 1, "layer_types": None, "norm_output": True}, tensors)


def _read(target: Path, layout: MtpLayout) -> dict[str, Tensor]:
    """Reads the module's tensors and no others, as they are stored."""
    stored = {
        name: place for name, place in stored_tensors(target, partial=True).items() if name.startswith(layout.prefix)
    }
    tensors: dict[str, Tensor] = {}
    for path in sorted({place.path for place in stored.values()}):
        tensors |= read_tensors(path, [name for name, place in stored.items() if place.path == path])
    return tensors
