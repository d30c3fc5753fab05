"""Tests heads as deployed: encoded rows, projections at the target, and 8-bit products."""

import gc
import pickle
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.compute.hidden_states import StateCapture, decode_rows
from actors.compute.linear import EightBitProjection, can_round
from actors.drafters import products
from actors.drafters.heads.dflash.drafting import load_dflash
from actors.drafters.heads.files import read_head
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.drafters.lookup.hybrid import hybrid
from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.products import choose_products
from actors.drafters.registry import (
    MODULES,
    capture_spec,
    check_head,
    create_method,
    state_bounds,
    states_format,
    states_needed,
)
from actors.engine import memory
from actors.engine.memory import state_bytes
from cluster.config import DraftPool, validated
from cluster.config_sections import HEADS
from cluster.drafting.hidden_state_receiver import StateBounds
from cluster.drafting.method import LimitsStates, ReadsStates
from cluster.errors import ConfigError, ModelError
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.drafters.drafting import (
    ALL_TOKENS,
    a_draft,
    a_setup,
    decided,
    deployed_method,
    drafted,
    encoded,
    head_method,
    least_memory,
    wanted_block,
)
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    Change,
    altered,
    case,
    checkpoint,
    loaded,
    off_by,
    without,
)
from tests.unit.actors.drafters.heads.eagle_restated import RestatedEagle, Variant

CHECKED = {"medusa": "1.1.weight", "mlp_speculator": "speculator.ln.2.bias", "dflash": "norm.weight", "eagle": "d2t"}
FIXTURES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "dflash": "dflash", "eagle": "eagle3"}


def rows_of(name: str) -> Tensor:
    """Returns the states of the fixture's text; the speculator's fixture has only one position."""
    known = case(FIXTURES[name])
    rows = known["features"]
    return rows if rows.dim() > 1 else rows.expand(len(known["input_ids"]), -1)


@pytest.mark.parametrize("name", FIXTURES)
def test_encoded_rows_give_the_same_drafts_as_tensors(name: str) -> None:
    """Without rows there is no block; rows in two parts from the middle of the text give one."""
    folder = checkpoint(FIXTURES[name])
    known = case(FIXTURES[name])
    want = wanted_block(decided(known), 16)
    method = deployed_method(name, folder)
    assert isinstance(method, ReadsStates)
    rows = rows_of(name)
    sent = encoded(rows, method)
    assert len(sent) == len(rows) * method.states_format.row_bytes
    assert not drafted(method, want, b"").tokens
    block = drafted(method, want, sent)
    rounded = decode_rows(sent, method.states_format)
    assert torch.equal(rounded, rows.bfloat16().float())
    assert block == drafted(head_method(name, folder), want, rounded)
    assert block.tokens
    for _ in range(2):
        method.open(want.open)
        method.committed("s", want.tokens[1:])
        method.states("s", 5, encoded(rows[5:8], method))
        method.states("s", 8, encoded(rows[8:], method))
        (late,) = method.draft([want.request])
        method.close(["s"])
        assert late.tokens


@pytest.mark.parametrize(
    ("name", "states", "expected"),
    [
        ("eagle", {"keep": False}, (None, 512)),
        ("eagle", {"keep": False, "window": 3}, (None, 3)),
        ("eagle", {"window": 3}, (None, None)),
        ("dflash", {"keep": False}, (None, 512)),
        ("medusa", {"keep": False}, (1, 512)),
    ],
)
def test_number_of_sufficient_states(name: str, states: Any, expected: tuple[int | None, int | None]) -> None:
    draft = DraftPool.model_validate({"method": name, "model": str(checkpoint(FIXTURES[name])), "states": states})
    bounds = state_bounds(draft, TARGET)
    assert (bounds.window, bounds.min_states) == expected


def test_an_eagle_head_keeps_only_as_many_states_as_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    create = partial(deployed_method, "eagle", checkpoint("eagle3"))
    free = least_memory(monkeypatch, create)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    method = create()
    assert method.max_states == 64, "one session of full context fits"
    mixed = hybrid(NgramDraft(3, 1), method)
    assert isinstance(mixed, LimitsStates)
    assert mixed.max_states == 64
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 30)
    assert create().max_states == 64 * DraftPool(method="ngram").max_sessions
    assert deployed_method("medusa", checkpoint("medusa")).max_states is None


@pytest.mark.parametrize(
    ("kept", "room", "limit"), [(5, 3, 3), (3, 5, 3), (None, 3, 3), (3, None, 3), (None, None, None)]
)
def test_kept_states_are_limited_by_configuration_and_memory(
    kept: int | None, room: int | None, limit: int | None
) -> None:
    assert StateBounds(max_states=kept).with_room(room).max_states == limit


@pytest.mark.parametrize(("window", "expected"), [(3, 3), (512, 6)])
def test_no_more_are_read_than_a_heads_layers_see(tmp_path: Path, window: int, expected: int) -> None:
    folder = altered(tmp_path, "dflash", layer_types=["sliding_attention"] * 2, sliding_window=6)
    states = {"keep": False, "window": window}
    draft = DraftPool.model_validate({"method": "dflash", "model": str(folder), "states": states})
    assert state_bounds(draft, TARGET).min_states == expected


def test_every_head_can_be_deployed() -> None:
    assert MODULES.keys() >= HEADS


def test_a_head_that_learns_leaves_room_for_its_next_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint("eagle3_speculators")  # stores all of its weights
    fixed = a_draft("eagle", folder)
    learning = DraftPool.model_validate(fixed.model_dump() | {"learning": {"folder": str(tmp_path)}})
    least = [least_memory(monkeypatch, partial(create_method, draft, a_setup(draft))) for draft in (fixed, learning)]
    assert least[1] - least[0] == sum(tensor.nbytes for tensor in read_head(folder).tensors.values())


# ---------------------------------------------------------------- projections at the target


HIDDEN = 32
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Layout:
    """Published layout that begins with a projection."""

    method: str
    fixture: str

    @property
    def folder(self) -> Path:
        return checkpoint(self.fixture)


LAYOUTS = {
    name: Layout(name.partition("_")[0].removesuffix("3"), name)
    for name in ("eagle3", "eagle3_speculators", "dflash", "dflash_speculators")
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
    """Returns the projection as the leading rank receives it: pickled."""
    spec = pickle.loads(pickle.dumps(capture_spec(draft, TARGET, "float32")))
    return spec.projection_on(CPU)


def same_block(kind: str, folder: Path, tokens: tuple[int, ...], raw: Tensor) -> None:
    """Asserts that blocks and their acceptance probabilities do not depend on the place of projection."""
    want = wanted_block(tokens, 16)
    projected = at_target(a_draft(kind, folder, "target"))(raw)
    assert projected.shape == (len(raw), HIDDEN)
    there = drafted(head_method(kind, folder, is_projected=True), want, projected)
    here = drafted(head_method(kind, folder), want, raw)
    assert there.tokens == here.tokens != ()
    assert off_by(torch.tensor(there.chances), torch.tensor(here.chances)) < TOLERANCE


@torch.inference_mode()
def test_the_target_projects_states_as_the_drafter_would(layout: Layout) -> None:
    known = case(layout.fixture)
    raw = known["features"]
    same_block(layout.method, layout.folder, decided(known), raw)
    if layout.method == "dflash":
        own = load_dflash(layout.folder, TARGET, torch.float32, CPU, range(96)).project(raw)
    else:
        own = loaded(layout.folder).inputs(raw)
    assert off_by(at_target(a_draft(layout.method, layout.folder, "target"))(raw), own) < TOLERANCE


@pytest.mark.skipif(not can_round(CPU), reason="this build of torch has no products in 8 bits")
@torch.inference_mode()
def test_a_head_in_8_bits_takes_what_the_target_projects_in_its_own_type(layout: Layout) -> None:
    known = case(layout.fixture)
    raw = known["features"]
    projected = at_target(a_draft(layout.method, layout.folder, "target", quantization="int8"))(raw)
    assert torch.equal(projected, at_target(a_draft(layout.method, layout.folder, "target"))(raw))
    rounded = head_method(layout.method, layout.folder, is_projected=True, product=EightBitProjection)
    want = wanted_block(decided(known), 1)
    assert drafted(rounded, want, projected).tokens != ()
    with pytest.raises(AssertionError, match=r"unexpected row width|not 32"):
        drafted(rounded, want, raw)


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
    assert len(StateCapture(spec, 2, 4, CPU).cache.read([0, 7])) == 2 * spec.format.row_bytes


@pytest.mark.parametrize("method", WITHOUT)
def test_heads_without_a_projection_send_states_as_they_are(method: str) -> None:
    spec = capture_spec(a_draft(method, checkpoint(WITHOUT[method]), "auto"), TARGET, "float32")
    assert spec is not None
    assert (spec.format.width, spec.load_projection) == (HIDDEN, None)


def test_heads_without_a_projection_are_refused_where_the_target_is_to_project() -> None:
    with pytest.raises(ModelError, match=r"draft\.states\.project is target, but .* set it to auto or drafter"):
        capture_spec(a_draft("eagle", checkpoint("eagle1"), "target"), TARGET, "float32")
    for method in ("medusa", "mlp_speculator"):
        with pytest.raises(ValueError, match=f"method {method} has no projection"):
            a_draft(method, checkpoint(method), "target")


@torch.inference_mode()
def test_a_projection_that_narrows_nothing_stays_at_the_drafter_by_default(tmp_path: Path) -> None:
    """The projection of a single state keeps its width, so the configuration decides instead of the width."""
    folder = RestatedEagle(Variant(aux=1, config={"eagle_aux_hidden_state_layer_ids": [4]})).save(tmp_path)
    spec = capture_spec(a_draft("eagle", folder, "auto"), TARGET, "float32")
    assert spec is not None
    assert spec.load_projection is None
    same_block("eagle", folder, tuple(range(1, 7)), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4)))


# ---------------------------------------------------------------- products in 8 bits


PRODUCTS = {"medusa": 5 * 2, "mlp_speculator": 3 * 2}  # minimum number, for heads with few layers

needs_8_bits = pytest.mark.skipif(not can_round(CPU), reason="this build of torch has no products in 8 bits")


@needs_8_bits
@pytest.mark.parametrize("name", FIXTURES)
def test_every_product_of_a_deployed_head_is_in_8_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[tuple[int, ...]] = []

    class Spied(EightBitProjection):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            made.append(tuple(weight.shape))
            super().__init__(weight, bias)

    monkeypatch.setattr(products, "EightBitProjection", Spied)
    method = deployed_method(name, checkpoint(FIXTURES[name]), quantization="int8")
    want = wanted_block(decided(case(FIXTURES[name])), 2)
    assert drafted(method, want, encoded(rows_of(name), method)).tokens
    assert len(made) >= PRODUCTS.get(name, 5)


@needs_8_bits
@pytest.mark.parametrize(("name", "load"), [("medusa", load_medusa), ("mlp_speculator", load_mlp_speculator)])
def test_logits_are_nearly_the_same_in_8_bits(name: str, load: Any) -> None:
    """Weights and rows each add a rounding error of up to 1/127 to sums of 32 products."""
    states = case("medusa")["features"]
    plain, rounded = (
        load(checkpoint(name), TARGET, torch.float32, CPU, ALL_TOKENS, *product).predict_next(states, [3] * 12, 0)
        for product in ([], [EightBitProjection])
    )
    off = (plain.logits - rounded.logits).abs().max() / plain.logits.abs().max()
    assert 0 < off < 0.05


def test_operations_around_8_bit_products_use_float32() -> None:
    assert choose_products("none", "bfloat16", CPU).dtype is torch.bfloat16
    if can_round(CPU):
        assert choose_products("int8", "bfloat16", CPU).dtype is torch.float32


@pytest.mark.parametrize(
    ("quantization", "device"), [("int8", torch.device("meta")), ("fp8", CPU), ("int4", CPU)], ids=str
)
def test_unsupported_products_are_refused(quantization: str, device: torch.device) -> None:
    with pytest.raises(ModelError, match=f"{quantization} is not supported on {device}"):
        choose_products(quantization, "bfloat16", device)


def test_8_bit_products_of_integers_are_for_cpus() -> None:
    gpu = {"method": "mtp", "mtp": {"quantization": "int8"}, "resources": {"num_gpus": 1}}
    with pytest.raises(ConfigError, match=r"mtp\.quantization int8 requires CPUs"):
        validated({"model": {"target": "t"}, "draft": gpu})


# ---------------------------------------------------------------- exchanges of weights

LEARNING = ("eagle", "medusa", "mlp_speculator")


def negated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Negates LM heads, among others, but no projection of the target's states."""
    return {name: -each if "head" in name or name.endswith(".1.weight") else each for name, each in tensors.items()}


@pytest.mark.parametrize("name", LEARNING)
def test_an_exchanged_head_drafts_as_a_new_one(name: str, tmp_path: Path) -> None:
    folder = altered(tmp_path, FIXTURES[name], negated)
    want = wanted_block(decided(case(FIXTURES[name])), 16)
    method, new = deployed_method(name, checkpoint(FIXTURES[name])), deployed_method(name, folder)
    rows = encoded(rows_of(name), method)
    before, expected = drafted(method, want, rows), drafted(new, want, rows)
    assert before.tokens != expected.tokens
    method.open(want.open)
    method.committed("s", want.tokens[1:])
    method.states("s", 0, rows)
    exchange = method.prepare_weights(folder)
    assert method.draft([want.request]) == [before], "nothing changes before the exchange"
    assert exchange() is not None, "the caller frees the old weights"
    assert method.draft([want.request])[0].tokens == expected.tokens, "open sessions keep their states"


@pytest.mark.parametrize("name", LEARNING)
def test_an_exchanged_head_is_freed_without_the_garbage_collector(name: str, tmp_path: Path) -> None:
    """The heap that exists when serving starts is exempt from collection."""
    method = deployed_method(name, checkpoint(FIXTURES[name]))
    used = method.prepare_weights(altered(tmp_path, FIXTURES[name], negated))()
    alive = weakref.ref(used.token_ids)
    gc.disable()
    try:
        del used
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("medusa", without("4."), "its shape differs"),
        ("medusa", lambda tensors: tensors | {"0.1.weight": tensors["0.1.weight"] * float("nan")}, "NaN"),
        ("mlp_speculator", lambda tensors: {name: each * float("nan") for name, each in tensors.items()}, "NaN"),
        ("dflash", dict, "heads of this kind do not learn"),
    ],
)
def test_a_head_that_cannot_replace_the_one_in_use_is_refused(
    name: str, change: Change, why: str, tmp_path: Path
) -> None:
    method = deployed_method(name, checkpoint(FIXTURES[name]))
    with pytest.raises(ModelError, match=why):
        method.prepare_weights(altered(tmp_path, FIXTURES[name], change))


@pytest.mark.parametrize("method", sorted(HEADS))
def test_heads_are_checked_by_their_headers(tmp_path: Path, method: str) -> None:
    check_head(a_draft(method, checkpoint(FIXTURES[method])), TARGET, ALL_TOKENS)
    for name, change in (("missing", without(CHECKED[method])), ("more", lambda t: t | {"gate": torch.ones(1)})):
        folder = tmp_path / name
        folder.mkdir()
        draft = a_draft(method, altered(folder, FIXTURES[method], change))
        with pytest.raises(ModelError):
            check_head(draft, TARGET, ALL_TOKENS)
