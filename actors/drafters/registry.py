"""Maps a drafting method's name to its module, and describes the hidden states that the method reads.

A method is a module with a function `create`, and one line in `MODULES`. Only the configured method's module is
imported, so a drafter without a model does not need torch. A method that reads the target's hidden states (see
`STATE_READERS` in the configuration) also defines:

    states_needed(draft: DraftPool, target: Path) -> StatesNeeded
    load_projection(draft: DraftPool, target: Path, dtype: str, device: torch.device) -> StateProjection

    check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None

where `target` is the target's folder. `check_head` is required only if `draft.model` is a head, `load_projection` only
if `states_needed` sets `projected_width`. The latter runs in the target's process and loads only the projection.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cluster.config import DraftPool
from cluster.config_sections import STATE_READERS
from cluster.drafting.hidden_state_receiver import NO_BOUNDS, StateBounds
from cluster.drafting.method import DraftingMethod, RecordsStates
from cluster.errors import ModelError
from protos.frozen import value
from protos.messages import StateDtype, StatesFormat, StatesNeeded

if TYPE_CHECKING:
    from actors.compute.hidden_states import CaptureSpec, StateProjection
    from actors.sampling.logits_processors import ProcessorFactory


@value
class OtherTarget:
    """A further target of the same drafter."""

    target: str  # Hugging Face id or folder
    tokens: Mapping[int, str]  # token strings by id


@value
class DraftSetup:
    """Parameters of a method in addition to its own configuration section."""

    dtype: str  # dtype of draft and target
    max_context: int  # maximum tokens per session
    draft_tokens: int  # maximum tokens per block
    target_tokens: Mapping[int, str]  # token strings by id; other ids are never proposed
    target: str  # Hugging Face id or folder of the target, whose weights some methods use
    states: StatesFormat | None = None  # encoding of the target's hidden states, if the method reads them
    processor_factories: "tuple[ProcessorFactory, ...]" = ()  # additional ones, with inputs other than the Open
    recorder: RecordsStates | None = None  # keeps the hidden states of sessions that the draft may learn from
    others: Mapping[str, OtherTarget] = field(default_factory=dict)  # targets of other models, by name


MODULES: Mapping[str, str] = MappingProxyType(
    {
        "draft_model": "actors.drafters.loading",
        "ngram": "actors.drafters.lookup.ngram",
        "hybrid": "actors.drafters.lookup.hybrid",
        "layer_skip": "actors.drafters.layer_skip",
        "suffix": "actors.drafters.lookup.suffix",
        "medusa": "actors.drafters.heads.medusa",
        "mlp_speculator": "actors.drafters.heads.mlp_speculator",
        "dflash": "actors.drafters.heads.dflash.drafting",
        "eagle": "actors.drafters.heads.eagle.method",
        "mtp": "actors.drafters.heads.eagle.mtp",
    }
)


def check_shared_vocabulary(draft: DraftPool, vocabularies: Mapping[str, str]) -> None:
    """Raises ModelError if the models of a draft pool, given as fingerprints by name, cannot share its drafters.

    `suffix` searches the answers of all models, so their ids must have the same meaning.
    """
    if draft.method == "suffix" and len(set(vocabularies.values())) > 1:
        raise ModelError(
            f"the vocabularies of {' and '.join(vocabularies)} differ, but method suffix searches the answers of all"
            " models; give each its own draft pool in drafts"
        )


def create_method(draft: DraftPool, setup: DraftSetup) -> DraftingMethod:
    """Creates the configured method. Raises ModelError if its model does not match the target."""
    return _created(draft.method, draft, setup)


def create_model_method(draft: DraftPool, setup: DraftSetup) -> DraftingMethod:
    """Creates the method of `draft.model`, for use inside another method, such as `hybrid`."""
    return _created(draft.model_method, draft, setup)


def _created(method: str, draft: DraftPool, setup: DraftSetup) -> DraftingMethod:
    create: Callable[[DraftPool, DraftSetup], DraftingMethod] = import_module(MODULES[method]).create
    return create(draft, setup)


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded | None:
    """Returns the method's requirements on hidden states of the target in folder `target`; None if it reads none."""
    if draft.model_method not in STATE_READERS:
        return None
    needed: StatesNeeded = _module(draft).states_needed(draft, target)
    return needed


def check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None:
    """Runs the loader of the head in `draft.model` on headers alone; the head proposes only `tokens`.

    Raises ModelError if tensors are missing, misshapen or unused, or do not match the target in folder `target`.
    """
    _module(draft).check_head(draft, target, tokens)


def states_format(draft: DraftPool, target: Path) -> StatesFormat | None:
    """Returns the encoding of hidden states; None if the method reads none."""
    needed = states_needed(draft, target)
    return None if needed is None else _format(draft, needed)


def state_bounds(draft: DraftPool, target: Path) -> StateBounds:
    """Returns the limits on the hidden states that a drafter accepts and stores."""
    needed = states_needed(draft, target)
    if needed is None:
        return NO_BOUNDS
    enough = None if draft.states.keep else min(draft.states.window, needed.sees or draft.states.window)
    return StateBounds(needed.window, enough, draft.states.kept_tokens)


def capture_spec(draft: DraftPool, target: Path, dtype: str) -> "CaptureSpec | None":
    """Returns the hidden states that the target must capture; None if the method reads none."""
    from actors.compute.hidden_states import CaptureSpec

    needed = states_needed(draft, target)
    if needed is None:
        return None
    is_projected = draft.states.projects_at_target(needed)
    load = partial(_load_projection, draft, target, dtype) if is_projected else None
    return CaptureSpec(needed.layers, _format(draft, needed), load, draft.states.keep)


def _format(draft: DraftPool, needed: StatesNeeded) -> StatesFormat:
    """Returns the encoding. Raises ModelError if `project` is `target` but the method has no projection."""
    width = needed.projected_width if draft.states.projects_at_target(needed) else needed.width
    assert width is not None, "a projection has a width"
    return StatesFormat(width, StateDtype[draft.states.dtype.upper()])


def _load_projection(draft: DraftPool, target: Path, dtype: str, device: Any) -> "StateProjection":
    projection: StateProjection = _module(draft).load_projection(draft, target, dtype, device)
    return projection


def _module(draft: DraftPool) -> Any:
    """Imports the module of the method that reads states."""
    return import_module(MODULES[draft.model_method])
