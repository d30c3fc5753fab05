"""From a published head that reads the target's final state to a drafting method."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.engine.process import device_of
from actors.methods.heads.head_files import PICKLES
from actors.methods.heads.last_state.last_state_drafting import LastRows, LastStateDrafting, LastStateHead
from actors.methods.heads.target_shape import target_shape
from actors.methods.model.calibration import Calibration
from actors.methods.model.limits import DraftingLimits
from actors.methods.model.sampling import DraftSampler
from actors.methods.setup import DraftSetup
from actors.models.checkpoint import local_folder
from cluster.config import DraftPool
from protos.states import StatesNeeded

log = logging.getLogger(__name__)


class HeadConfig(Protocol):
    """What a head was understood to be."""

    def describe(self) -> list[str]:
        """One line a fact."""
        ...


class LoadedHead(LastStateHead, Protocol):
    """A head, and what its logits are for."""

    @property
    def token_ids(self) -> Tensor:
        """Of the target, by column of the logits, (columns,)."""
        ...

    @property
    def config(self) -> HeadConfig: ...


class HeadLoader(Protocol):
    """Raises ModelError where the folder's head does not fit the target."""

    def __call__(
        self,
        folder: Path,
        target_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        proposable: Collection[int],
    ) -> LoadedHead: ...


def final_state(target: Path) -> StatesNeeded:
    """What such heads read of the target in this folder."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden, window=1)


def last_state_drafting(load: HeadLoader, draft: DraftPool, setup: DraftSetup, top_k: int) -> LastStateDrafting:
    """The head that `draft.model` names, drafting with as many entries of draft_probs; logs how it was understood."""
    assert draft.model is not None, "a configuration whose method loads a head names it"
    device = device_of(draft.resources)
    dtype: torch.dtype = getattr(torch, setup.dtype)
    target = local_folder(setup.target, with_weights=False)
    head = load(local_folder(draft.model, more=PICKLES), target, dtype, device, setup.target_tokens.keys())
    log.info("\n".join(head.config.describe()))
    rows = target_shape(target).vocabulary
    sampler = DraftSampler(head.token_ids, rows, DraftingLimits(top_k), Calibration())
    return LastStateDrafting(head, sampler, LastRows(device, dtype))
