"""Recognition of a draft checkpoint's published layout, from its content and never from its name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from actors.drafters.heads.dflash.weights import ALIASES as DFLASH_ALIASES
from actors.drafters.heads.eagle.layer_ids import SECTION
from actors.drafters.heads.eagle.names import ALIASES as EAGLE_ALIASES
from actors.drafters.heads.files import EMBEDDING, HeadFiles
from actors.drafters.model.pard import MASK_KEYS


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Kind of a checkpoint, and the drafting method that uses it."""

    name: str
    method: str | None  # a value of draft.method; None: not supported


SPECULATORS_KEY = "speculators_model_type"
CAUSAL = DraftLayout("causal language model", "draft_model")
PARD = DraftLayout("causal language model with mask tokens (PARD)", "draft_model")
LAYER_SKIP = DraftLayout("the target itself, some of whose layers can draft", "layer_skip")
UNKNOWN = DraftLayout("no draft checkpoint that is known here", None)
MLP_SPECULATOR = DraftLayout("MLPSpeculator", "mlp_speculator")
WITH_MTP = DraftLayout("a target with multi-token prediction of its own", "mtp")
MTP = r"(?:model\.)?(?:mtp\.|mtp_layers\.|(?:layers\.\d+\.)?eh_proj\.)"  # prefix of names in such a module

MEDUSA: Mapping[str, DraftLayout] = MappingProxyType(
    {
        r"\d+\.\d+\.linear\.weight": DraftLayout("Medusa heads, FasterDecoding's layout", "medusa"),
        r"medusa_head\.\d+\.\d+\.": DraftLayout("Medusa heads merged with their target (Medusa-2)", "medusa"),
        r"(?:medusa_heads\.)?blocks\.\d+\.layers\.\d+\.": DraftLayout("Medusa heads, vLLM's layout", "medusa"),
    }
)
"""Layouts by prefix of a tensor's name."""

WITHOUT_METHOD: Mapping[str, DraftLayout] = MappingProxyType(
    {
        r"(?:hydra_head\.)?hydra_mlp\.": DraftLayout("Hydra heads", None),
        r"(?:markov_head\.)?markov_w1\.": DraftLayout("DSpark head", None),
        r"candidate_selector\.": DraftLayout("DFlash2 head", None),
        r"prefix_gru\.": DraftLayout("Domino head", None),
        r"lilicorr\.": DraftLayout("LiLiCorr head", None),
        r"xpress_head\.": DraftLayout("XPress head", None),
        r"parallel_draft_heads\.": DraftLayout("EAGLE with Medusa heads, ModelOpt's", None),
        MTP: DraftLayout("multi-token prediction without its target", None),
    }
)


def layout_of(files: HeadFiles) -> DraftLayout:
    """Recognizes the layout from a folder's tensors and configuration."""
    names = tuple(files.tensors)
    has_embedding = any(name in files.tensors for name in EMBEDDING)
    if has_embedding and _any(names, MTP):
        return WITH_MTP
    if found := _by_name(names, MEDUSA) or _by_name(names, WITHOUT_METHOD):
        return found
    if _any(names, r"(?:speculator\.)?emb\.\d+\.weight"):
        return MLP_SPECULATOR
    if _is_dflash(files):
        return DraftLayout(f"DFlash head, {_dflash_publisher(files.config)} layout", "dflash")
    if found := _eagle(files):
        return found
    if not has_embedding:
        return UNKNOWN
    return PARD if any(files.config.get(key) is not None for key in MASK_KEYS) else CAUSAL


def _is_dflash(files: HeadFiles) -> bool:
    tensors = files.renamed(DFLASH_ALIASES).tensors
    return "hidden_norm.weight" in tensors and "fc.weight" in tensors


def _eagle(files: HeadFiles) -> DraftLayout | None:
    """Recognizes EAGLE heads by the first layer's inputs: two concatenated rows, or a projection of them."""
    tensors = files.renamed(EAGLE_ALIASES).tensors
    queries = tensors.get("layers.0.self_attn.q_proj.weight")
    if queries is None:
        return None
    body = {**files.config, **(files.config.get("transformer_layer_config") or {})}
    if queries.shape[-1] == 2 * int(body.get("hidden_size") or 0):
        kind = "P-EAGLE" if "mask_hidden" in tensors else "EAGLE-3"
        return DraftLayout(f"{kind} head, {_eagle3_publisher(files.tensors, files.config)} layout", "eagle")
    if "fc.weight" not in tensors:
        return None
    return DraftLayout(f"EAGLE-1/2 head, {_eagle_publisher(files.tensors)} layout", "eagle")


def _dflash_publisher(config: Mapping[str, Any]) -> str:
    return "speculators'" if SPECULATORS_KEY in config else "z-lab's"


def _eagle3_publisher(names: Iterable[str], config: Mapping[str, Any]) -> str:
    if SPECULATORS_KEY in config:
        return "speculators'"
    if SECTION in config:
        return "ModelOpt's or SpecForge's"
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or ()):
        return "SpecForge's"
    return "SafeAILab's" if _any(names, r"(?:model\.)?midlayer\.") else "vLLM's"


def _eagle_publisher(names: Iterable[str]) -> str:
    if _any(names, r"fusion_fc\.|transformer\."):
        return "speculators'"
    return "HASS's" if _any(names, r"(?:model\.)?embed_layernorm\.") else "SafeAILab's"


def _by_name(names: Iterable[str], layouts: Mapping[str, DraftLayout]) -> DraftLayout | None:
    return next((layout for pattern, layout in layouts.items() if _any(names, pattern)), None)


def _any(names: Iterable[str], pattern: str) -> bool:
    return any(re.match(pattern, name) for name in names)
