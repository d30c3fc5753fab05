"""Tests the state of a router process that serves several models."""

from typing import Any

from cluster.audit import OUTCOMES
from serve_app.routed_model import summed


def state(**more: Any) -> dict[str, Any]:
    counts: dict[str, Any] = {name: {} for name in ("remedies", "routed", "handovers", "examples", "refusals")}
    audits = {"audits": dict.fromkeys(OUTCOMES, 0)}
    flags = {"idle": True, "ready": True, "audits_waiting": 1, "widest_near_tie": 0.0}
    return {**counts, **audits, **flags, **more}


def test_states_of_several_models_are_added_up() -> None:
    states = [
        state(routed={"load": 2}, refusals={"t1": "vocabulary differs"}, widest_near_tie=0.5),
        state(routed={"load": 1, "prefix": 1}, ready=False),
    ]
    made = summed(states)
    assert (made["idle"], made["ready"], made["audits_waiting"], made["widest_near_tie"]) == (True, False, 2, 0.5)
    assert (made["routed"], made["refusals"]) == ({"load": 3, "prefix": 1}, {"t1": "vocabulary differs"})
    assert made["audits"] == dict.fromkeys(OUTCOMES, 0), "counts of zero are kept, for the status"
