"""From a published head that reads the target's final state to a drafting method."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.linear import Product
from actors.engine.process import device_of
from actors.methods.heads.head_files import PICKLES, folder_to_borrow_from
from actors.methods.heads.head_products import head_products
from actors.methods.heads.last_state.last_rows import LastRows
from actors.methods.heads.last_state.last_state_drafting import LastStateHead, LastStatePredictor
from actors.methods.heads.predicted_drafting import PredictedDrafting
from actors.methods.heads.target_shape import target_shape
from actors.methods.model.calibration import Calibration
from actors.methods.model.limits import DraftingLimits
from actors.methods.model.sampling import DraftSampler
from actors.methods.setup import DraftSetup
from actors.models.checkpoint import local_folder
from actors.sampling.logits.makers import MAKERS
from cluster.config import DraftPool
from cluster.draft_options import HeadOptions
from protos.states import StatesNeeded

log = logging.getLogger(__name__)


class LoadedHead(LastStateHead, Protocol):
    """A head, and what its logits are for."""

    @property
    def token_ids(self) -> Tensor:
        """Of the target, by column of the logits, (columns,)."""
        ...


class HeadLoader(Protocol):
    """Raises ModelError where the folder's head does not fit the target."""

    def __call__(
        self,
        folder: Path,
        target_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        proposable: Collection[int],
        product: Product,
    ) -> LoadedHead: ...


def final_state(target: Path) -> StatesNeeded:
    """What such heads read of the target in this folder."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden, window=1)


def head_folder(draft: DraftPool) -> Path:
    """Of the head that `draft.model` names."""
    assert draft.model is not None, "a configuration whose method loads a head names it"
    return local_folder(draft.model, more=PICKLES)


def last_state_drafting(
    load: HeadLoader,
    draft: DraftPool,
    setup: DraftSetup,
    options: HeadOptions,
    borrowed: Sequence[Sequence[str]] = (),
) -> PredictedDrafting:
    """The head that `draft.model` names, with the options of its method; logs how it was understood.

    `borrowed` is what it takes of the target's checkpoint: of each group the first tensor that there is.
    """
    device = device_of(draft.resources)
    products = head_products(options, setup.dtype, device)
    target = folder_to_borrow_from(setup.target, borrowed)
    head = load(head_folder(draft), target, products.dtype, device, setup.target_tokens.keys(), products.product)
    log.info("\n".join(head.config.describe()))
    rows = target_shape(target).vocabulary
    limits = DraftingLimits(options.draft_probs_top_k)
    sampler = DraftSampler(head.token_ids, rows, limits, Calibration(), (*MAKERS, *setup.makers))
    return PredictedDrafting(LastStatePredictor(head, sampler, LastRows(device, products.dtype)), sampler)
