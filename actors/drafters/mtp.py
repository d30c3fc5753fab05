"""Drafting with the multi-token prediction (MTP) module of the target's own checkpoint, run like an EAGLE head."""

from pathlib import Path

from actors.drafters.eagle import deployed
from actors.drafters.heads.decoded_states import DecodedStates
from actors.drafters.heads.mtp.loading import folder_with_mtp, load_mtp, mtp_states
from actors.drafters.heads.products import head_products
from actors.drafters.setup import DraftSetup
from actors.engine.process import device_of
from cluster.config import DraftPool
from protos.states import StatesNeeded


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Requests the target's final hidden state at every position."""
    return mtp_states(target)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the target's checkpoint has no MTP module, or an unsupported kind."""
    device = device_of(draft.resources)
    products = head_products(draft.mtp, setup.dtype, device)
    folder = folder_with_mtp(setup.target)
    head = load_mtp(folder, products.dtype, device, setup.target_tokens.keys(), products.product)
    return deployed(head, draft, draft.mtp, setup)
