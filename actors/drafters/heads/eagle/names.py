"""Canonical names of an EAGLE head's tensors, whatever layout it was published in.

Known layouts: SafeAILab's (`midlayer.` for EAGLE-3, `layers.0.` before), SpecForge's, vLLM's, ModelOpt's, and the old
and new ones of speculators.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from actors.drafters.heads.files import HeadFiles
from cluster.errors import ModelError

ALIASES = (
    (r"eagle_module\.", ""),
    (r"(?:model\.)?midlayer\.", "layers.0."),
    (r"model\.", ""),
    (r"transformer\.", "layers.0."),  # speculators up to 0.3
    (r"fusion_fc\.", "fc."),
    (r"embedding_layernorm\.", "embed_layernorm."),
    (r"pre_lm_head_layernorm\.", "lm_head_layernorm."),
    (r"hidden_layernorm\.", "layers.0.input_layernorm."),  # HASS, in the layout of speculators
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
)
NOT_COMPUTED_WITH = ("t2d", "verifier_")  # used in training only
NEITHER = "rotary_emb.inv_freq"  # follows from the configuration


def canonical(files: HeadFiles) -> HeadFiles:
    """Renames all tensors to their canonical names. Raises ModelError for quantized weights."""
    if files.config.get("quantization_config"):
        raise ModelError(f"{files.folder} is a quantised draft head, which is not supported; use its original")
    return replace(files, tensors=_without_stray_norm(files.tensors)).renamed(ALIASES)


def check_all_used(files: HeadFiles, used: set[str]) -> None:
    """Raises ModelError for tensors that the forward would not use: they belong to another kind of head."""
    left = [name for name in sorted(files.tensors) if name not in used and not _is_ignored(name)]
    if left:
        raise ModelError(f"{files.folder} holds tensors that no EAGLE head known here computes with: {', '.join(left)}")


def layer_count(files: HeadFiles) -> int:
    """Returns the number of decoder layers with tensors. Raises ModelError if there is none, or a gap."""
    numbers = {int(name.split(".")[1]) for name in files.tensors if name.startswith("layers.")}
    if not numbers or numbers != set(range(len(numbers))):
        raise ModelError(
            f"{files.folder} is no EAGLE head: it has the decoder layers {sorted(numbers)}, expected 0, ..."
        )
    return len(numbers)


def linear_width(files: HeadFiles, name: str) -> int:
    """Returns the number of inputs of a linear layer."""
    weight: Tensor = files.tensor(f"{name}.weight")
    return int(weight.shape[-1])


def _without_stray_norm(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Drops a norm that HASS heads without other norms store but do not use (speculators 0.3, convert/eagle)."""
    if "embed_layernorm.weight" in tensors:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != "hidden_layernorm.weight"}


def _is_ignored(name: str) -> bool:
    return name.startswith(NOT_COMPUTED_WITH) or name.endswith(NEITHER)
