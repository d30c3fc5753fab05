"""Projected at the source: the target applies a head's first projection, and drafts stay what they were."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.compute.hidden_states import StateCapture
from actors.compute.linear import can_round
from actors.drafters.registry import capture_spec, states_format, states_needed
from actors.engine.memory import state_bytes
from cluster.config import DraftPool
from cluster.errors import ModelError
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, case, checkpoint, off_by
from tests.unit.actors.drafters.heads.eagle_restated import RestatedEagle, Variant
from tests.unit.actors.drafters.heads.state_drafting import a_draft, a_method, a_request, decided, drafted

HIDDEN = 32
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Layout:
    """A published layout that begins with a projection, and how many states it reads side by side."""

    method: str
    fixture: str
    next_token: str

    @property
    def folder(self) -> Path:
        return checkpoint(self.fixture)


LAYOUTS = {
    "eagle3": Layout("eagle", "eagle3", "next_token"),
    "eagle3_speculators": Layout("eagle", "eagle3_speculators", "next_token"),
    "dflash": Layout("dflash", "dflash", "anchor"),
    "dflash_speculators": Layout("dflash", "dflash_speculators", "anchor"),
}
NORMED = {
    "norm_before_fc": Variant(feature_norm="input_norm", config={"norm_before_fc": True}),
    "fc_norm": Variant(feature_norm="fc_norm", config={"fc_norm": True}),
    "fc_norm by its legacy names": Variant(feature_norm="legacy", config={"use_aux_norm": True}),
    "fc bias": Variant(fc_bias=True, config={"bias": True}),
    "a hidden size of its own": Variant(hidden=48, config={"target_hidden_size": 32}),
}
WITHOUT = {"eagle": "eagle1", "medusa": "medusa", "mlp_speculator": "mlp_speculator"}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


def at_target(draft: DraftPool) -> Any:
    """The projection as the leading rank gets it: by a pickle."""
    spec = pickle.loads(pickle.dumps(capture_spec(draft, TARGET, "float32")))
    return spec.projection_on(CPU)


@torch.inference_mode()
def test_drafts_are_the_same_wherever_states_are_projected(layout: Layout) -> None:
    """Tokens, and what the head takes their chances for."""
    known = case(layout.fixture)
    tokens = decided(known, layout.next_token)
    raw = known["features"]
    projected = at_target(a_draft(layout.method, layout.folder, "target"))(raw)
    assert projected.shape == (len(raw), HIDDEN)
    there = drafted(a_method(layout.method, layout.folder, "target"), tokens, 0, projected, a_request(tokens))
    here = drafted(a_method(layout.method, layout.folder), tokens, 0, raw, a_request(tokens))
    assert there.tokens == here.tokens != ()
    assert off_by(torch.tensor(there.chances), torch.tensor(here.chances)) < TOLERANCE


@torch.inference_mode()
def test_what_the_target_makes_of_states_is_what_the_drafter_would(layout: Layout) -> None:
    raw = case(layout.fixture)["features"]
    projected = at_target(a_draft(layout.method, layout.folder, "target"))(raw)
    method: Any = a_method(layout.method, layout.folder)
    project = method._predictor._decoder.project if layout.method == "dflash" else method._feed._project
    assert off_by(projected, project(raw)) < TOLERANCE


@pytest.mark.skipif(not can_round(CPU), reason="this build of torch has no products in 8 bits")
@torch.inference_mode()
def test_a_head_in_8_bits_takes_what_the_target_projects_in_its_own_type(layout: Layout) -> None:
    known = case(layout.fixture)
    tokens = decided(known, layout.next_token)
    raw = known["features"]
    draft = a_draft(layout.method, layout.folder, "target", quantization="int8")
    projected = at_target(draft)(raw)
    assert torch.equal(projected, at_target(a_draft(layout.method, layout.folder, "target"))(raw))
    rounded = a_method(layout.method, layout.folder, "target", quantization="int8")
    assert drafted(rounded, tokens, 0, projected, a_request(tokens, 1)).tokens != ()
    with pytest.raises(AssertionError, match=r"as wide as was asked for|not 32"):
        drafted(rounded, tokens, 0, raw, a_request(tokens, 1))


@pytest.mark.parametrize("variant", NORMED)
@torch.inference_mode()
def test_norms_and_biases_of_the_projection_go_with_it(tmp_path: Path, variant: str) -> None:
    restated = RestatedEagle(NORMED[variant])
    draft = a_draft("eagle", restated.save(tmp_path), "target")
    needed = states_needed(draft, TARGET)
    assert needed is not None
    raw = torch.randn(7, needed.width, generator=torch.Generator().manual_seed(3))
    found = at_target(draft)(raw)
    assert found.shape[-1] == needed.projected_width
    assert off_by(found, restated.project(raw)) < TOLERANCE


@pytest.mark.parametrize("method", LAYOUTS.values(), ids=LAYOUTS)
def test_the_target_reads_no_other_tensor_of_the_head(method: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, ...]] = []
    to = torch.Tensor.to

    def spied(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        placed.append(tuple(tensor.shape))
        return to(tensor, *args, **named)

    monkeypatch.setattr(torch.Tensor, "to", spied)
    at_target(a_draft(method.method, method.folder, "target"))
    width = case(method.fixture)["features"].shape[-1]
    norm = [(HIDDEN,)] if method.method == "dflash" else []
    assert placed == [(HIDDEN, width), *norm]


@pytest.mark.parametrize("dtype", StateDtype)
@pytest.mark.parametrize(("project", "narrowed"), [("auto", True), ("target", True), ("drafter", False)])
def test_rows_are_narrower_in_pages_and_on_the_way(layout: Layout, dtype: StateDtype, project: str, narrowed: bool):
    draft = DraftPool(
        method=layout.method,  # type: ignore[arg-type]
        model=str(layout.folder),
        states={"project": project, "dtype": dtype.name.lower()},  # type: ignore[arg-type]
    )
    width = HIDDEN if narrowed else case(layout.fixture)["features"].shape[-1]
    spec = capture_spec(draft, TARGET, "float32")
    assert spec is not None
    assert spec.format == states_format(draft, TARGET) == StatesFormat(width, dtype)
    assert state_bytes(spec, page_size=1) == spec.format.row_bytes
    assert StateCapture(spec, 2, 4, CPU).cache._rows.shape == (8, spec.format.row_bytes)


@pytest.mark.parametrize("method", WITHOUT)
def test_heads_without_a_projection_send_states_as_they_are(method: str) -> None:
    spec = capture_spec(a_draft(method, checkpoint(WITHOUT[method]), "auto"), TARGET, "float32")
    assert spec is not None
    assert (spec.format.width, spec.load_projection) == (HIDDEN, None)


def test_and_are_refused_where_the_target_is_told_to_project() -> None:
    with pytest.raises(ModelError, match=r"draft\.states\.project is target, but .* set it to auto or drafter"):
        capture_spec(a_draft("eagle", checkpoint("eagle1"), "target"), TARGET, "float32")
    for method in ("medusa", "mlp_speculator"):
        with pytest.raises(ValueError, match=f"method {method} has no projection"):
            a_draft(method, checkpoint(method), "target")


@torch.inference_mode()
def test_a_projection_that_narrows_nothing_stays_at_the_drafter_unless_it_is_told_to_move(tmp_path: Path) -> None:
    """A row of one state is as wide as what is made of it: the configuration, not the width, tells which it is."""
    restated = RestatedEagle(Variant(aux=1, config={"eagle_aux_hidden_state_layer_ids": [4]}))
    folder = restated.save(tmp_path)
    assert capture_spec(a_draft("eagle", folder, "auto"), TARGET, "float32").load_projection is None  # type: ignore[union-attr]
    raw = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))
    tokens = tuple(range(1, 7))
    projected = at_target(a_draft("eagle", folder, "target"))(raw)
    there = drafted(a_method("eagle", folder, "target"), tokens, 0, projected, a_request(tokens))
    here = drafted(a_method("eagle", folder, "auto"), tokens, 0, raw, a_request(tokens))
    assert there.tokens == here.tokens != ()
    assert off_by(torch.tensor(there.chances), torch.tensor(here.chances)) < TOLERANCE
