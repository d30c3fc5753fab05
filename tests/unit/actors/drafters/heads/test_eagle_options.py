"""Options of `draft.eagle` override the head's own configuration in every process."""

from typing import Any

import pytest
import torch

from actors.drafters.heads.eagle.config import EagleOverrides, LayerIdMeaning, OutputNorm, overrides_of
from actors.drafters.registry import DraftSetup, capture_spec, create_method, states_format
from cluster.config import DraftPool, validated
from cluster.config_sections import EagleOptions
from cluster.errors import ConfigError
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, altered, case, checkpoint, off_by

IDS = "eagle_aux_hidden_state_layer_ids"


def a_draft(folder: Any = None, **options: Any) -> DraftPool:
    return DraftPool(method="eagle", model=str(folder or checkpoint("eagle3")), eagle=EagleOptions(**options))


def layers_of(draft: DraftPool) -> tuple[int, ...]:
    """Returns the states that the target captures."""
    spec = capture_spec(draft, TARGET, "float32")
    assert spec is not None
    return spec.layers


def config_of(draft: DraftPool) -> Any:
    """Returns the configuration that the drafter resolves."""
    tokens = {token: str(token) for token in range(96)}
    setup = DraftSetup("float32", 64, 4, tokens, str(TARGET), states_format(draft, TARGET))
    method: Any = create_method(draft, setup)
    return method._method._forwards._runner._head.config


def test_defaults_override_nothing() -> None:
    assert overrides_of(EagleOptions()) == EagleOverrides()


def test_states_selects_the_states_read() -> None:
    draft = a_draft(states=(0, 1, 7))
    assert layers_of(draft) == config_of(draft).needs.layers == (0, 1, 7)


@pytest.mark.parametrize(("configured", "layers"), [("state", (1, 4, 6)), ("output", (2, 5, 7)), (None, (1, 4, 6))])
def test_layer_ids_sets_the_meaning_of_ids(tmp_path: Any, configured: str | None, layers: tuple[int, ...]) -> None:
    draft = a_draft(altered(tmp_path, "eagle3", **{IDS: [1, 4, 6]}), layer_ids=configured)
    assert layers_of(draft) == config_of(draft).needs.layers == layers


@pytest.mark.parametrize(
    ("configured", "norm"), [("nothing", OutputNorm.NOTHING), ("logits", OutputNorm.LOGITS), ("both", OutputNorm.BOTH)]
)
def test_output_norm_sets_the_use_of_the_last_norm(configured: str, norm: OutputNorm) -> None:
    assert config_of(a_draft(output_norm=configured)).output_norm is norm


def test_max_positions_overrides_the_configuration() -> None:
    assert config_of(a_draft(max_positions=4096)).max_positions == 4096


def test_the_target_projects_the_selected_states() -> None:
    """The target loads the projection in its own process, with the same options."""
    raw = case("eagle3")["features"]
    spec = capture_spec(a_draft(states=(0, 1, 7)), TARGET, "float32")
    usual = capture_spec(a_draft(), TARGET, "float32")
    assert spec is not None
    assert usual is not None
    one = spec.projection_on(CPU)
    other = usual.projection_on(CPU)
    assert one is not None
    assert other is not None
    with torch.inference_mode():
        assert off_by(one(raw), other(raw)) == 0.0


def test_every_option_becomes_an_override() -> None:
    options = EagleOptions(states=(1, 2), layer_ids="output", output_norm="both", max_positions=9)
    assert overrides_of(options) == EagleOverrides((1, 2), LayerIdMeaning.OUTPUT, OutputNorm.BOTH, 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"states": [3, 1]}, "eagle.states"),
        ({"states": []}, "eagle.states"),
        ({"states": [-1, 2]}, "eagle.states"),
        ({"layer_ids": "input"}, "eagle.layer_ids"),
        ({"output_norm": "some"}, "eagle.output_norm"),
        ({"max_positions": 0}, "eagle.max_positions"),
        ({"norm_output": True}, "eagle.norm_output"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validated({"model": {"target": "t"}, "draft": {"method": "eagle", "model": "m", "eagle": options}})
