"""Loads a published head that reads the target's final state, and creates the drafting method."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.linear import Product
from actors.drafters.heads.files import PICKLES, folder_to_borrow_from
from actors.drafters.heads.head_drafter import PredictedDrafting
from actors.drafters.heads.last_state.drafting import LastStateHead, LastStatePredictor
from actors.drafters.heads.last_state.last_rows import LastRows
from actors.drafters.heads.products import head_products
from actors.drafters.heads.target_shape import target_shape
from actors.drafters.model.calibration import Calibration
from actors.drafters.model.limits import DraftingLimits
from actors.drafters.model.sampling import DraftSampler
from actors.drafters.setup import DraftSetup
from actors.engine.process import device_of
from actors.models.checkpoint import local_folder
from actors.sampling.logits.processor_registry import MAKERS
from cluster.config import DraftPool
from cluster.draft_options import HeadOptions
from protos.states import StatesNeeded

log = logging.getLogger(__name__)


class LoadedHead(LastStateHead, Protocol):
    """A head, and the tokens that its logits stand for."""

    @property
    def token_ids(self) -> Tensor:
        """Token ids of the target by column of the logits, (columns,)."""
        ...


class HeadLoader(Protocol):
    """Loads a head from a folder. Raises ModelError if it does not fit the target."""

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
    """Returns the state that such heads read of the target in this folder."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden, window=1)


def head_folder(draft: DraftPool) -> Path:
    """Returns the folder of the head named by `draft.model`."""
    assert draft.model is not None, "a configuration whose method loads a head names it"
    return local_folder(draft.model, more=PICKLES)


def last_state_drafting(
    load: HeadLoader,
    draft: DraftPool,
    setup: DraftSetup,
    options: HeadOptions,
    borrowed: Sequence[Sequence[str]] = (),
) -> PredictedDrafting:
    """Creates the method for the head named by `draft.model`, and logs how the head was understood.

    `borrowed` lists the tensors that it takes from the target's checkpoint: of each group the first that exists.
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
