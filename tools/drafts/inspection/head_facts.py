"""Collects facts from a checkpoint's headers, with the functions that resolve a head when it is loaded.

Without a target, a head is resolved for the target that it claims to be made for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from actors.drafters.heads.dflash.config import DFlashConfig, resolve_dflash
from actors.drafters.heads.dflash.loading import MAX_POSITIONS
from actors.drafters.heads.dflash.weights import ALIASES as DFLASH_ALIASES
from actors.drafters.heads.eagle.config import EagleConfig, overrides_of
from actors.drafters.heads.eagle.names import canonical
from actors.drafters.heads.eagle.resolution import resolve
from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.last_state.medusa import MedusaConfig, heads_alone, resolve_medusa
from actors.drafters.heads.last_state.medusa import borrowed_tensors_of as borrowed_by_medusa
from actors.drafters.heads.last_state.mlp_speculator import ALIASES as MLP_ALIASES
from actors.drafters.heads.last_state.mlp_speculator import MlpSpeculatorConfig, resolve_mlp_speculator
from actors.drafters.heads.mtp.loading import module_files, resolve_mtp
from actors.drafters.heads.mtp.names import layout_in
from actors.drafters.heads.rope import rope_of
from actors.drafters.heads.target_shape import TargetShape, target_shape
from cluster.config import DraftPool
from protos.states import StatesNeeded
from tools.drafts.inspection.facts import DraftFacts, StatesRead
from tools.drafts.inspection.header_files import stored_size
from tools.drafts.inspection.layout import DraftLayout

HeadConfig = EagleConfig | DFlashConfig | MedusaConfig | MlpSpeculatorConfig
DEPTHS = (1 << 10, 1 << 11)  # two target depths: facts that differ between them depend on the depth
SAID_BY_FACTS = ("reads the target's state", "proposes ", "positions up to ", "embedding of ")
COUNT = 3  # default number of states that an EAGLE-3 head reads


def canonical_files(files: HeadFiles, method: str) -> HeadFiles:
    """Renames tensors to the names that the method's loader uses. Raises ModelError as the loader does."""
    return _CANONICAL[method](files)


def resolved(files: HeadFiles, draft: DraftPool, target: TargetShape) -> HeadConfig:
    """Resolves a head in canonical names for a target, with the options of its method.

    Raises ModelError if it does not fit.
    """
    return _RESOLVE[draft.method](files, target, draft)


def presumed_target(files: HeadFiles, draft: DraftPool, depth: int = DEPTHS[0]) -> TargetShape:
    """Returns the target that a head in canonical names was made for; few heads state its depth."""
    body = {**files.config, **(files.config.get("transformer_layer_config") or {})}
    method = draft.method
    if method == "medusa":
        return _of_heads(files, depth)
    if method == "mlp_speculator":
        (vocabulary, _) = files.tensor("emb.0.weight").shape
        return TargetShape(int(files.tensor("proj.0.weight").shape[-1]), int(vocabulary), depth)
    own = int(body.get("hidden_size") or 0)
    if method != "eagle":
        return TargetShape(own, int(body.get("vocab_size") or 0), depth)
    states = len(draft.eagle.states or ()) or COUNT
    hidden = _hidden_read(files, int(body.get("target_hidden_size") or own), states)
    return TargetShape(hidden, int(body.get("vocab_size") or 0), depth)


def head_facts(files: HeadFiles, layout: DraftLayout, draft: DraftPool) -> DraftFacts:
    """Collects facts about a head in canonical names. Raises ModelError if it is inconsistent."""
    config = resolved(files, draft, presumed_target(files, draft))
    deeper = resolved(files, draft, presumed_target(files, draft, DEPTHS[1]))
    needs = config.needs if config.needs == deeper.needs else replace(config.needs, layers=())
    found = DraftFacts(layout, stored_size(files.tensors), conventions=conventions_of(config))
    return _described(found, files, config, draft, needs)


def conventions_of(config: HeadConfig) -> tuple[str, ...]:
    """Returns the loader's description of the head, without the lines that have facts of their own."""
    return tuple(line for line in config.describe() if not line.startswith(SAID_BY_FACTS))


def _described(
    facts: DraftFacts, files: HeadFiles, config: HeadConfig, draft: DraftPool, needs: StatesNeeded
) -> DraftFacts:
    target = presumed_target(files, draft)
    states = _states_read(config, needs, target)
    facts = replace(facts, vocabulary=config.vocabulary, proposes=config.columns, states=states)
    if isinstance(config, EagleConfig):
        return replace(
            facts,
            shape=_decoder_shape(config) | {"layers": config.layers},
            embedding=config.embedding.value,
            lm_head=config.lm_head.value,
            positions=config.max_positions,
            ends_at_positions=True,
            rope=str(config.rope),
        )
    if isinstance(config, DFlashConfig):
        return replace(
            facts,
            shape=_decoder_shape(config) | {"layers": len(config.layers), "block_size": config.block_size},
            embedding=_whose(files, "embed_tokens.weight"),
            lm_head=_whose(files, "lm_head.weight"),
            positions=int(files.config.get("max_position_embeddings") or MAX_POSITIONS),
            rope=str(config.rope),
            longest_block=config.block_size - 1,
        )
    if isinstance(config, MedusaConfig):
        is_open = bool(borrowed_by_medusa(files)) and "vocab_size" not in files.config
        return replace(
            facts,
            vocabulary=None if is_open else config.vocabulary,
            proposes=None if is_open else config.columns,
            shape={"hidden": config.hidden, "heads": config.heads, "blocks": config.blocks},
            embedding="none",
            lm_head="the target" if borrowed_by_medusa(files) else "the head",
            longest_block=config.heads,
        )
    return replace(
        facts,
        shape={"hidden": config.hidden, "inner": config.inner, "steps": config.steps},
        embedding="the head",
        lm_head="the head",
        longest_block=config.steps,
    )


def causal_facts(files: HeadFiles, layout: DraftLayout) -> DraftFacts:
    """Collects facts about a causal language model. Raises ModelError for an unknown kind of rotary positions."""
    text: Mapping[str, Any] = files.config.get("text_config") or files.config
    names = {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    vocabulary = int(text["vocab_size"]) if "vocab_size" in text else None
    return DraftFacts(
        layout=layout,
        size=stored_size(files.tensors),
        shape={short: int(text[key]) for short, key in names.items() if isinstance(text.get(key), int)},
        vocabulary=vocabulary,
        proposes=vocabulary,
        embedding="its own",
        lm_head="its own" if "lm_head.weight" in files.tensors else "its own embedding",
        positions=text.get("max_position_embeddings"),
        rope=str(rope_of(text)),
    )


def _states_read(config: HeadConfig, needs: StatesNeeded, target: TargetShape) -> StatesRead:
    return StatesRead(
        layers=needs.layers,
        is_final=config.needs.layers == (target.layers,),
        hidden=target.hidden,
        width=needs.width,
        projected=needs.projected_width,
    )


def _hidden_read(files: HeadFiles, said: int, states: int) -> int:
    """Returns the hidden size of an EAGLE head's target; `fc` is as wide as all states that it reads."""
    fc = files.tensors.get("fc.weight")
    if fc is None or not said or fc.shape[-1] % said == 0:
        return said
    return int(fc.shape[-1]) // states


def _of_heads(files: HeadFiles, depth: int) -> TargetShape:
    """Returns the target's shape from Medusa heads, whose last matrix is an LM head."""
    shapes = [tensor.shape for name, tensor in files.tensors.items() if name.endswith(".weight")]
    rows = [int(shape[0]) for shape in shapes]
    return TargetShape(int(shapes[0][-1]), int(files.config.get("vocab_size") or max(rows)), depth)


def _decoder_shape(config: EagleConfig | DFlashConfig) -> dict[str, int]:
    return {
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }


def _whose(files: HeadFiles, name: str) -> str:
    return "the head" if name in files.tensors else "the target"


def _first_module(files: HeadFiles) -> HeadFiles:
    """Returns the first MTP module of a target's folder."""
    layout = layout_in(files.tensors, target_shape(files.folder).layers, str(files.folder))
    return module_files(files.folder, layout, files.tensors)


_CANONICAL: Mapping[str, Callable[[HeadFiles], HeadFiles]] = MappingProxyType(
    {
        "eagle": canonical,
        "dflash": lambda files: files.renamed(DFLASH_ALIASES),
        "medusa": heads_alone,
        "mlp_speculator": lambda files: files.renamed(MLP_ALIASES),
        "mtp": _first_module,
    }
)
_RESOLVE: Mapping[str, Callable[[HeadFiles, TargetShape, DraftPool], HeadConfig]] = MappingProxyType(
    {
        "eagle": lambda files, target, draft: resolve(files, target, overrides_of(draft.eagle)),
        "dflash": lambda files, target, _: resolve_dflash(files, target),
        "medusa": lambda files, target, _: resolve_medusa(files, target),
        "mlp_speculator": lambda files, target, _: resolve_mlp_speculator(files, target),
        "mtp": lambda files, target, _: resolve_mtp(files, target),
    }
)
