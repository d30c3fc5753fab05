"""Drafting with the multi-token prediction (MTP) module of the target's own checkpoint, run as an EAGLE head.

DeepSeek-V3: arXiv 2412.19437, section 2.2. The inputs are a token's embedding and the target's final state at the
preceding position, each normed separately. One decoder layer, a norm and the target's LM head predict the next token.
For further tokens, the module's own normed output replaces the target's state.

`MtpLayout` describes the differences between checkpoints: names, order of embedding and state, and whether zeros
replace the embedding at position 0, as in vLLM's deepseek_mtp.py and mimo_mtp.py.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from actors.compute.linear import Product, projection
from actors.drafters.heads.eagle.config import NO_OVERRIDES, EagleConfig, EagleKind, resolve
from actors.drafters.heads.eagle.loading import EagleHead, head_of
from actors.drafters.heads.eagle.method import deployed
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles
from actors.drafters.heads.projection import DecodedStates
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.process import device_of
from actors.models.checkpoint import first_existing, folder_with, local_folder
from actors.models.config_reader import read_config
from actors.models.weights import INDEX, SINGLE, Stored, indexed_files, read_tensors, stored_tensors
from cluster.config import DraftPool
from cluster.errors import ModelError
from protos.messages import StatesNeeded

LAYER = re.compile(
    r"layers\.0\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.(weight|bias)"
)
"""Matches tensor names of a decoder layer with the Llama architecture."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of tensors outside the decoder layer, by EAGLE name; all start with `prefix`."""

    name: str
    prefix: str
    fc: str
    embedding_norm: str
    state_norm: str
    last_norm: str
    layer: str = ""  # prefix of the decoder layer's tensor names
    lm_head: str = ""
    state_first: bool = False  # the state precedes the embedding in the input
    hides_first: bool = False  # zeros replace the embedding at position 0

    def own_name(self, stored: str) -> str:
        """Returns the EAGLE name of a stored tensor."""
        name = stored.removeprefix(self.prefix)
        module, _, kind = name.rpartition(".")
        names = {
            self.fc: "fc",
            self.embedding_norm: "embed_layernorm",
            self.state_norm: "state_layernorm",
            self.last_norm: "lm_head_layernorm",
            self.lm_head: "lm_head",
            "embed_tokens": "embed_tokens",
        }
        return f"{names[module]}.{kind}" if module in names else f"layers.0.{name.removeprefix(self.layer)}"


def layouts_of(layers: int) -> tuple[MtpLayout, ...]:
    """Returns the known layouts of a target with `layers` layers."""
    deepseek = MtpLayout(
        name="DeepSeek's",
        prefix=f"model.layers.{layers}.",
        fc="eh_proj",
        embedding_norm="enorm",
        state_norm="hnorm",
        last_norm="shared_head.norm",
        lm_head="shared_head.head",
        hides_first=True,
    )
    mimo = MtpLayout(
        name="MiMo's",
        prefix="model.mtp_layers.0.",
        fc="input_proj",
        embedding_norm="token_layernorm",
        state_norm="hidden_layernorm",
        last_norm="final_layernorm",
        state_first=True,
        hides_first=True,
    )
    qwen = MtpLayout(
        name="Qwen's",
        prefix="mtp.",
        fc="fc",
        embedding_norm="pre_fc_norm_embedding",
        state_norm="pre_fc_norm_hidden",
        last_norm="norm",
        layer="layers.0.",
    )
    return deepseek, mimo, qwen


def layout_in(stored: Iterable[str], layers: int, where: str) -> MtpLayout:
    """Returns the layout of a checkpoint with these tensors. Raises ModelError if none matches."""
    names = set(stored)
    for layout in layouts_of(layers):
        if f"{layout.prefix}{layout.fc}.weight" in names:
            return layout
    expected_names = ", ".join(f"{layout.prefix}{layout.fc}.weight" for layout in layouts_of(layers))
    raise ModelError(
        f"{where} holds no supported multi-token prediction module: none of {expected_names}; use a target that"
        " contains one, or another drafting method"
    )


def module_count(stored: Iterable[str], layout: MtpLayout) -> int:
    """Returns the number of MTP modules in a checkpoint; modules are numbered consecutively."""
    first = re.fullmatch(r"(.*?)(\d+)\.", layout.prefix + layout.layer)
    assert first is not None, "a module's prefix ends in a number"
    numbered = re.compile(rf"{re.escape(first[1])}(\d+)\.")
    numbers = {int(match[1]) for name in stored if (match := numbered.match(name))}
    return next(found for found in count() if int(first[2]) + found not in numbers)


def check_layer(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises ModelError unless the decoder layer has the Llama architecture."""
    others = sorted(name for name in tensors if name.startswith("layers.") and not LAYER.fullmatch(name))
    if others:
        shown = ", ".join(name.removeprefix("layers.0.") for name in others[:4])
        raise ModelError(
            f"the multi-token prediction module in {where} has a decoder layer with {shown}, expected queries, keys,"
            " values and a gated MLP, as Llama and Qwen have; experts and latent attention are not supported"
        )


def mtp_states(target: Path) -> StatesNeeded:
    """Returns the input state of the MTP module: the target's final state, after the last norm."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden)


def folder_with_mtp(target: str) -> Path:
    """Returns the target's folder; downloads only the module and its shared tensors.

    `target` is a folder or a Hugging Face id. Raises ModelError under the same conditions as `load_mtp`.
    """
    layers = target_shape(local_folder(target, with_weights=False)).layers

    def wanted(names: Collection[str]) -> list[str]:
        layout = layout_in(names, layers, target)
        return [*(name for name in names if name.startswith(layout.prefix)), *first_existing((EMBEDDING, HEAD))(names)]

    return folder_with(target, wanted)


def load_mtp(
    target: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> EagleHead:
    """Loads the first MTP module of a target, and the tensors that they share.

    Raises ModelError if the module is missing or unsupported.
    """
    shape = target_shape(target)
    stored = stored_tensors(target, partial=True)
    indexed = {} if (target / SINGLE).is_file() or not (target / INDEX).is_file() else indexed_files(target)
    layout = layout_in({*stored, *indexed}, shape.layers, str(target))
    absent = {file for name, file in indexed.items() if name.startswith(layout.prefix) and name not in stored}
    if absent:
        raise ModelError(
            f"{target} lacks {', '.join(sorted(absent))}, which hold tensors of its multi-token prediction module by"
            f" {INDEX}; fetch these files"
        )
    files = module_files(target, layout, _read(layout, stored))
    config = replace(resolve_mtp(files, shape), hides_first=layout.hides_first)
    return head_of(files, config, target, dtype, device, proposable, product)


def resolve_mtp(files: HeadFiles, target: TargetShape) -> EagleConfig:
    """Resolves an MTP module from EAGLE tensor names. Raises ModelError if it is unsupported."""
    check_layer(files.tensors, str(files.folder))
    window = files.config.get("sliding_window")
    if window and files.config.get("use_sliding_window", True):
        raise ModelError(f"the target in {files.folder} attends to a window of {window}; use another method than mtp")
    return replace(resolve(files, target, NO_OVERRIDES), kind=EagleKind.MTP)


def module_files(target: Path, layout: MtpLayout, stored: Mapping[str, Tensor]) -> HeadFiles:
    """Returns the module's tensors under EAGLE names, with the target's configuration restricted to one layer.

    Raises ModelError if a norm is missing.
    """
    for norm in (layout.embedding_norm, layout.state_norm, layout.last_norm):
        if (name := f"{layout.prefix}{norm}.weight") not in stored:
            raise ModelError(
                f"the multi-token prediction module in {target} lacks the tensor {name}; fetch the checkpoint again"
            )
    tensors = {layout.own_name(name): tensor for name, tensor in stored.items() if name.startswith(layout.prefix)}
    if layout.state_first:
        state, embedding = tensors["fc.weight"].chunk(2, dim=-1)
        tensors["fc.weight"] = torch.cat((embedding, state), dim=-1)
    config = read_config(target).get_text_config().to_dict()
    return HeadFiles(target, config | {"num_hidden_layers": 1, "layer_types": None, "norm_output": True}, tensors)


def _read(layout: MtpLayout, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Reads only the module's tensors, in their stored dtypes."""
    own = {name: tensor for name, tensor in stored.items() if name.startswith(layout.prefix)}
    tensors: dict[str, Tensor] = {}
    for path in sorted({tensor.path for tensor in own.values()}):
        tensors |= read_tensors(path, [name for name, tensor in own.items() if tensor.path == path])
    return tensors


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Requires the target's final hidden state at every position."""
    return mtp_states(target)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the checkpoint's MTP module is missing or unsupported."""
    device = device_of(draft.resources)
    products = choose_products(draft.mtp.quantization, setup.dtype, device)
    folder = folder_with_mtp(setup.target)
    head = load_mtp(folder, products.dtype, device, setup.target_tokens.keys(), products.product)
    return deployed(head, draft, draft.mtp, setup)
