"""Interpretation of the layer ids in an EAGLE-3 head's configuration: which of the target's hidden states it reads.

State k is the input of the target's layer k, counted from 0 (`protos.states`). Ids are published with two meanings. The
reference implementation, vLLM and speculators number the states: id k is state k. SpecForge, SGLang and ModelOpt number
the layers whose outputs are read, in a section `eagle_config`: id k is state k + 1. A wrong interpretation raises no
error, but halves acceptance or worse.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from cluster.errors import ModelError

KEY = "eagle_aux_hidden_state_layer_ids"
OUTPUTS_KEY = "target_layer_ids"
SECTION = "eagle_config"
FIRST_OF_STATES = 2  # the default's first id as a state; as a layer's output it is 1


class LayerIdMeaning(Enum):
    """Meaning of an id k."""

    STATE = "state"  # state k
    OUTPUT = "output"  # the output of layer k, which is state k + 1


def states_read(
    config: Mapping[str, Any], target_layers: int, count: int, meaning: LayerIdMeaning | None = None
) -> tuple[int, ...]:
    """Returns the `count` states that a head with this configuration reads, in ascending order.

    `meaning` overrides the meaning implied by the key of the ids; a configuration without ids gets the reference's
    default. Raises ModelError if the number of ids differs from the head's inputs, or the target has no such states.
    """
    named = _named(config)
    if named is None:
        states = default_states(target_layers)
        source = f"{KEY} is not in its configuration, and the default"
    else:
        ids, usual = named
        shift = 1 if (meaning or usual) is LayerIdMeaning.OUTPUT else 0
        states = tuple(sorted(k + shift for k in ids))
        source = f"layer ids {list(ids)}"
    check_states(states, target_layers, count, source)
    return states


def default_states(target_layers: int) -> tuple[int, ...]:
    """Returns the defaults of the reference implementation (SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py)."""
    return 2, target_layers // 2, target_layers - 3


def check_states(states: Sequence[int], target_layers: int, count: int, source: str) -> None:
    """Raises ModelError unless these are `count` distinct states that exist before the target's last layer ends."""
    if len(states) != count:
        raise ModelError(
            f"the EAGLE-3 head reads {count} states side by side, but {source} names {len(states)}: {list(states)}"
        )
    if len(set(states)) < count or not all(0 <= k < target_layers for k in states):
        raise ModelError(
            f"{source} of the EAGLE-3 head means the states {list(states)}, expected different ones from 0 to"
            f" {target_layers - 1}: the target has {target_layers} layers"
        )


def _named(config: Mapping[str, Any]) -> tuple[tuple[int, ...], LayerIdMeaning] | None:
    """Returns the ids of a configuration and their usual meaning there."""
    section = config.get(SECTION) or {}
    if config.get(KEY):
        return _ids(config[KEY]), LayerIdMeaning.STATE
    if section.get(KEY):
        ids = _ids(section[KEY])
        # Some writers of this section number the states nevertheless: the first default id tells (SGLang PR 25454).
        return ids, LayerIdMeaning.STATE if min(ids) == FIRST_OF_STATES else LayerIdMeaning.OUTPUT
    if config.get(OUTPUTS_KEY):
        return _ids(config[OUTPUTS_KEY]), LayerIdMeaning.OUTPUT
    return None


def _ids(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(isinstance(k, int) for k in found):
        raise ModelError(f"the head's layer ids are {found!r}, expected a list of whole numbers")
    return tuple(found)
