"""Self-speculation: a draft model of some of the target's own layers, with its final norm and LM head.

After LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) and Draft & Verify (Zhang et al. 2023, arXiv 2309.08168). It
needs no second checkpoint. The acceptance rate depends on the target's training.
"""

from actors.drafters.loading import draft_with
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.process import device_of
from actors.models.checkpoint import folder_with, layer_names
from actors.models.layer_subset import load_layers
from cluster.config import DraftPool


def create(draft: DraftPool, setup: DraftSetup) -> DraftModel:
    """Creates the method. Raises ModelError if the target lacks a layer or a layer cannot be read."""
    device = device_of(draft.resources)
    products = choose_products(draft.draft_model.quantization, setup.dtype, device)
    layers = draft.layer_skip.ids
    model = load_layers(folder_with(setup.target, layer_names(layers)), layers, products.dtype_name, device)
    return draft_with(model, products.product, draft, setup)
