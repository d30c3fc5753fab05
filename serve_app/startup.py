"""What takes long before a replica takes part: downloads, and models that are loaded and measured.

All of it is waited for in a thread or a rank: who starts a replica goes on, and gives up a start that hangs.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.drafters.pass_profile import profile_drafting
from actors.drafters.registry import create_method, state_bounds, states_format
from actors.drafters.setup import DraftSetup
from actors.grammars.compiler import grammars_of
from actors.grammars.vocabulary import load_grammar_vocabulary
from actors.models.checkpoint import checkpoint_fingerprint, local_folder, vocabulary, vocabulary_fingerprint
from cluster.config import SlipstreamConfig
from cluster.costs import DraftCost
from cluster.drafting.method import DraftingMethod
from cluster.drafting.session_table import DrafterLimits
from serve_app.target_engines import StartedEngine, start_engine


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The target's checkpoint, here; a drafter has all but its weights."""

    folder: Path
    tokens: Mapping[int, str]
    vocabulary_print: str
    model_print: str


def _target_files(model: str, with_weights: bool) -> TargetFiles:
    """Downloads what is not here yet, and reads what identifies it."""
    folder = local_folder(model, with_weights)
    tokens = vocabulary(folder)
    return TargetFiles(folder, tokens, vocabulary_fingerprint(tokens), checkpoint_fingerprint(folder))


async def start_target(config: SlipstreamConfig, engine: str) -> tuple[TargetFiles, StartedEngine]:
    """Raises ModelError for what cannot be served, EngineError for what fails."""
    files = await asyncio.to_thread(_target_files, config.model.target, with_weights=True)
    return files, await start_engine(config, files.folder, files.tokens, engine)


@dataclass(frozen=True, slots=True)
class StartedDrafter:
    """What drafts, and what its passes cost."""

    files: TargetFiles
    method: DraftingMethod
    limits: DrafterLimits
    costs: DraftCost


def start_drafter(config: SlipstreamConfig) -> StartedDrafter:
    """Loads what drafts, and measures its passes; raises ModelError for what does not fit the target."""
    files = _target_files(config.model.target, with_weights=False)
    states = states_format(config.draft, files.folder)
    bounds = state_bounds(config.draft, files.folder)
    grammars = grammars_of(partial(load_grammar_vocabulary, files.folder))
    setup = DraftSetup(
        dtype=config.model.dtype,
        max_context=config.model.max_context,
        max_draft_tokens=config.speculation.max_draft_tokens,
        target_tokens=files.tokens,
        target=config.model.target,
        states=states,
        makers=() if grammars is None else (grammars.draft_masking,),
    )
    max_sessions = config.draft.max_sessions
    limits = DrafterLimits(max(files.tokens) + 1, config.model.max_context, max_sessions, states, bounds)
    method = create_method(config.draft, setup)
    return StartedDrafter(files, method, limits, profile_drafting(method, limits))
