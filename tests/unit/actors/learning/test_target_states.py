"""States that are computed offline equal those of the reference."""

from typing import Literal

import pytest
import torch

from actors.compute.hidden_states import decode_rows
from actors.drafters.registry import capture_spec
from actors.learning.target_states import kept_states
from actors.models.checkpoint import load_model
from cluster.config import DraftPool
from cluster.learning import Example
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, case, checkpoint, loaded


@pytest.mark.parametrize("project", ["target", "drafter"])
def test_states_are_those_that_a_drafter_would_receive(project: Literal["target", "drafter"]) -> None:
    draft = DraftPool.model_validate(
        {"method": "eagle", "model": str(checkpoint("eagle3")), "states": {"project": project}}
    )
    spec = capture_spec(draft, TARGET, "float32")
    assert spec is not None
    text = tuple(case("eagle3")["input_ids"].tolist())
    examples = [Example(text[:4], text[4:], session="long"), Example(text[:4], text[4:8], session="short")]
    short, long = kept_states(load_model(TARGET, "float32", CPU), spec, "a kind", examples)
    assert (short.session, long.session, long.kind, long.first) == ("short", "long", "a kind", 0)
    expected = case("eagle3")["features"]
    if project == "target":
        expected = loaded(checkpoint("eagle3")).inputs(expected)
    for states, length in ((short, 8), (long, 12)):
        rows = decode_rows(states.rows, spec.format)
        torch.testing.assert_close(rows, expected[:length], atol=0.02, rtol=0.01)  # bfloat16
