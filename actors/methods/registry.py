"""Drafting methods by name: a method is a module with a function `create`, and a line here.

The module is imported when its method is asked for, so that a drafter without a model needs no torch.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType

from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "draft_model": "actors.methods.loading",
        "prompt_lookup": "actors.methods.lookup.prompt_lookup",
        "lookup_first": "actors.methods.lookup_first",
        "layer_skip": "actors.methods.layer_skip",
        "suffix": "actors.methods.lookup.suffix",
        "medusa": "actors.methods.heads.last_state.medusa",
        "mlp_speculator": "actors.methods.heads.last_state.mlp_speculator",
        "dflash": "actors.methods.heads.dflash.dflash_loading",
    }
)


def create_method(draft: DraftPool, setup: DraftSetup) -> DraftingMethod:
    """The method that the configuration names. Raises ModelError where its model does not fit the target's."""
    create: Callable[[DraftPool, DraftSetup], DraftingMethod] = import_module(MODULES[draft.method]).create
    return create(draft, setup)
