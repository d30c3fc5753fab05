"""Drafting with the multi-token prediction module that the target's own checkpoint has, as with an EAGLE head."""

from pathlib import Path

from actors.engine.process import device_of
from actors.methods.eagle_drafting import deployed
from actors.methods.heads.decoded_states import DecodedStates
from actors.methods.heads.head_products import head_products
from actors.methods.heads.mtp.mtp_loading import folder_with_mtp, load_mtp, mtp_states
from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from protos.states import StatesNeeded


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """The target's final state, at every position."""
    return mtp_states(target)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Raises ModelError where the target's checkpoint has no module, or one of a kind that is not supported."""
    device = device_of(draft.resources)
    products = head_products(draft.mtp, setup.dtype, device)
    folder = folder_with_mtp(setup.target)
    head = load_mtp(folder, products.dtype, device, setup.target_tokens.keys(), products.product)
    return deployed(head, draft, draft.mtp, setup)
