"""Heads learn, have published layouts, and compute the same in training and in serving."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.compute.hidden_states import CaptureSpec, StateCapture, decode_rows
from actors.compute.kv_cache import InputRow
from actors.drafters.heads.dflash.drafting import DFlashContext, load_dflash
from actors.drafters.heads.eagle.loading import EagleRunner
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model
from actors.models.weights import read_tensors
from cluster.errors import ModelError
from examples.train_head.heads.target_parts import target_parts
from examples.train_head.objective import Learned
from examples.train_head.options import HeadKind
from examples.train_head.shards import Shards, StatesBatch
from examples.train_head.states import states_of
from examples.train_head.trainer import BEST, LATEST
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, loaded
from tests.unit.actors.tiny_models import MODELS, jittered
from tests.unit.examples.train_head.tiny_training import (
    CPU,
    HIDDEN,
    LAYERS,
    OPENING,
    UNROLL,
    VOCABULARY,
    a_training,
    an_option,
    curve,
    sequences,
    stored,
)

TOLERANCE = 1e-4
BFLOAT16 = 0.02  # relative to the largest state; twice the rounding error of a row on the wire
PAGE_SIZE = 4
PAGES = tuple(range(16))
HEADS = [
    pytest.param(HeadKind.EAGLE, None, 1, id="eagle"),
    pytest.param(HeadKind.EAGLE, 40, 1, id="eagle with a draft vocabulary"),
    pytest.param(HeadKind.EAGLE, None, 2, id="eagle of two layers"),
    pytest.param(HeadKind.MEDUSA, None, 1, id="medusa"),
    pytest.param(HeadKind.MEDUSA, 40, 1, id="medusa with a draft vocabulary"),
    pytest.param(HeadKind.MLP_SPECULATOR, None, 1, id="mlp_speculator"),
    pytest.param(HeadKind.DFLASH, None, 1, id="dflash"),
    pytest.param(HeadKind.DFLASH, 40, 2, id="dflash of two layers with a draft vocabulary"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return stored(tmp_path_factory.mktemp("states"))


def one_text(shards: Shards) -> StatesBatch:
    return shards.batch([max(shards.sequences, key=len)], CPU)


def trained_logits(training, batch: StatesBatch, step: int) -> Tensor:
    """Returns the logits of an unrolled step, (longest, columns)."""
    outputs = list(training.module.steps(batch, UNROLL))[step]
    with torch.no_grad():
        return training.module.logits(outputs[0], step)


@pytest.mark.parametrize(("kind", "draft_vocabulary", "layers"), HEADS)
def test_training_lowers_the_loss_and_raises_agreement(tmp_path, shards, kind, draft_vocabulary, layers):
    training = a_training(tmp_path, shards, an_option(kind, draft_vocabulary, layers), steps=40)
    before = training.held_out()
    training.run()
    after = training.held_out()
    assert after.loss < 0.9 * before.loss
    assert after.agreement.sum() > before.agreement.sum()
    assert [point["step"] for point in curve(tmp_path)] == list(range(4, 41, 4))
    assert curve(tmp_path)[-1]["held_out"] == [round(share, 4) for share in after.agreement.tolist()]


# ---------------------------------------------------------------- training and serving


@pytest.mark.parametrize(("draft_vocabulary", "layers"), [(None, 1), (40, 1), (None, 2)])
def test_an_eagle_head_drafts_as_trained(tmp_path, shards, draft_vocabulary, layers):
    """The test compares every unrolled step at every place with the loaded head, for equal states and tokens."""
    training = a_training(tmp_path, shards, an_option(HeadKind.EAGLE, draft_vocabulary, layers), steps=8)
    training.run()
    head = loaded(tmp_path / LATEST)
    assert head.config.needs.layers == LAYERS
    assert head.token_ids.tolist() == training.module.token_ids.tolist()
    batch = one_text(shards)
    tokens = batch.tokens[0].tolist()
    fed = tokens[1:]
    runner = EagleRunner(head, len(PAGES), PAGE_SIZE)
    states = head.inputs(batch.states[0, :-1])
    for last in (0, OPENING, len(fed) - UNROLL):
        row = InputRow(tuple(fed[: last + 1]), 0, last + 1, PAGES, states=states[: last + 1])
        output = runner.forward([row])
        torch.testing.assert_close(
            output.logits, trained_logits(training, batch, 0)[: last + 1], atol=TOLERANCE, rtol=0
        )
        for step in range(1, UNROLL):
            place = last + step
            row = InputRow((fed[place],), place, 1, PAGES, states=output.hidden[-1:])
            output = runner.forward([row])
            expected = trained_logits(training, batch, step)[last]
            torch.testing.assert_close(output.logits[-1], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_other_architectures_draft_as_trained(tmp_path, name):
    """The cases are biases, query and key norms, and layers without initial weights from the target."""
    target = tmp_path / "target"
    jittered(MODELS[name]()).save_pretrained(target)
    shards = stored(tmp_path / "states", target=target, layers=(1, 2))
    training = a_training(tmp_path / "head", shards, an_option(HeadKind.EAGLE), steps=2, target=target)
    training.run()
    head = loaded(tmp_path / "head" / LATEST, target=target)
    batch = one_text(shards)
    fed = tuple(batch.tokens[0, 1:].tolist())
    runner = EagleRunner(head, len(PAGES), PAGE_SIZE)
    row = InputRow(fed, 0, len(fed), PAGES, states=head.inputs(batch.states[0, :-1]))
    expected = trained_logits(training, batch, 0)[:-1]
    torch.testing.assert_close(runner.forward([row]).logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_target_with_capped_logits_is_refused(tmp_path):
    model = MODELS["llama"]()
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        target_parts(str(tmp_path))


def test_stored_states_equal_those_that_the_target_sends(shards):
    """The test compares a deployed target's state rows, read from its pages, with the rows of a shard."""
    batch = one_text(shards)
    layout = StatesFormat(len(LAYERS) * HIDDEN, StateDtype.BFLOAT16)
    capture = StateCapture(CaptureSpec(LAYERS, layout), len(PAGES), PAGE_SIZE, CPU)
    runner = ModelRunner(load_model(TARGET, "float32", CPU), len(PAGES), PAGE_SIZE, capture=capture)
    tokens = tuple(batch.tokens[0].tolist())
    output = runner.forward([InputRow(tokens, 0, len(tokens), PAGES)])
    served = decode_rows(runner.read_states(range(len(tokens))), layout)
    largest = float(batch.states.abs().max())
    torch.testing.assert_close(served, batch.states[0], atol=BFLOAT16 * largest, rtol=0)
    assert output.logits.argmax(dim=-1).tolist() == batch.choices[0].tolist()
    rolled = batch.states[0].roll(1, dims=0)
    assert (served - rolled).abs().max() > 4 * BFLOAT16 * largest, "a shift by one position would not show"


@pytest.mark.parametrize("draft_vocabulary", [None, 40])
def test_medusa_heads_draft_as_trained(tmp_path, shards, draft_vocabulary):
    training = a_training(tmp_path, shards, an_option(HeadKind.MEDUSA, draft_vocabulary), steps=8)
    training.run()
    heads = load_medusa(tmp_path / LATEST, TARGET, torch.float32, CPU, range(VOCABULARY))
    assert heads.token_ids.tolist() == training.module.token_ids.tolist()
    assert heads.config.width == UNROLL
    batch = one_text(shards)
    for depth in range(UNROLL):
        found = heads.predict_next(batch.final[0], (), depth).logits
        torch.testing.assert_close(found, trained_logits(training, batch, depth), atol=TOLERANCE, rtol=0)


def test_an_mlp_speculator_drafts_as_trained(tmp_path, shards):
    training = a_training(tmp_path, shards, an_option(HeadKind.MLP_SPECULATOR), steps=8)
    training.run()
    head = load_mlp_speculator(tmp_path / LATEST, TARGET, torch.float32, CPU, range(VOCABULARY))
    batch = one_text(shards)
    tokens = batch.tokens[0].tolist()
    places = len(tokens) - UNROLL
    states = batch.final[0, :places]
    for depth in range(UNROLL):
        taken = tokens[depth + 1 : depth + 1 + places]
        output = head.predict_next(states, taken, depth)
        expected = trained_logits(training, batch, depth)[:places]
        torch.testing.assert_close(output.logits, expected, atol=TOLERANCE, rtol=0)
        assert output.hidden is not None
        states = output.hidden


@pytest.mark.parametrize(("draft_vocabulary", "layers"), [(None, 1), (40, 2)])
def test_a_dflash_head_drafts_as_trained(tmp_path, shards, draft_vocabulary, layers):
    training = a_training(tmp_path, shards, an_option(HeadKind.DFLASH, draft_vocabulary, layers), steps=8)
    training.run()
    head = load_dflash(tmp_path / LATEST, TARGET, torch.float32, CPU, range(VOCABULARY))
    assert head.config.needs.layers == LAYERS
    assert head.config.block_size == 1 + UNROLL
    assert head.token_ids.tolist() == training.module.token_ids.tolist()
    batch = one_text(shards)
    tokens = batch.tokens[0].tolist()
    for place in (0, OPENING, len(tokens) - 2):
        context = DFlashContext()
        context.put(0, head.project(batch.states[0, : place + 1]))
        (hidden,) = head.hidden([context], [tokens[place + 1]], [place + 1])
        found = head.logits(hidden[1:])
        for step in range(UNROLL):
            expected = trained_logits(training, batch, step)[place]
            torch.testing.assert_close(found[step], expected, atol=TOLERANCE, rtol=0)


def test_a_shifted_state_position_is_detected(tmp_path, shards):
    """Otherwise the equality tests could pass for heads that almost ignore states."""
    training = a_training(tmp_path, shards, an_option(HeadKind.EAGLE), steps=4)
    batch = one_text(shards)
    shifted = replace(batch, states=batch.states.roll(1, dims=1))
    off_by = (trained_logits(training, batch, 0) - trained_logits(training, shifted, 0)).abs().max()
    assert off_by > 100 * TOLERANCE


# ---------------------------------------------------------------- checkpoints


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, shards):
    whole = a_training(tmp_path / "whole", shards, an_option(HeadKind.EAGLE), steps=8)
    whole.run()
    first = a_training(tmp_path / "parts", shards, an_option(HeadKind.EAGLE), steps=8)
    stopped_after(first, 4)
    second = a_training(tmp_path / "parts", shards, an_option(HeadKind.EAGLE), steps=8)
    assert second.step == 4
    second.run()
    for name, tensor in whole.module.state_dict().items():
        torch.testing.assert_close(second.module.state_dict()[name], tensor, atol=0, rtol=0)
    ignored = {"seconds"}
    assert [
        {key: value for key, value in point.items() if key not in ignored} for point in curve(tmp_path / "parts")
    ] == [{key: value for key, value in point.items() if key not in ignored} for point in curve(tmp_path / "whole")]


def stopped_after(training, step: int) -> None:
    """Interrupts training like a signal, just after a checkpoint."""

    def save() -> None:
        saved()
        raise KeyboardInterrupt

    saved = training._save
    training._save = save
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert training.step == step


def test_a_training_with_other_options_does_not_resume(tmp_path, shards):
    a_training(tmp_path, shards, an_option(HeadKind.EAGLE), steps=4).run()
    with pytest.raises(ModelError, match="use another folder"):
        a_training(tmp_path, shards, an_option(HeadKind.EAGLE), steps=5)


def test_the_best_head_is_kept(tmp_path, shards, monkeypatch):
    """Once held-out agreement falls again, the newest head differs from the best."""
    training = a_training(tmp_path, shards, an_option(HeadKind.MEDUSA), steps=12)
    shares = iter([0.2, 0.3, 0.1])

    def measured() -> Learned:
        return Learned(torch.tensor(1.0), torch.tensor([next(shares)] * UNROLL))

    monkeypatch.setattr(training, "held_out", measured)
    kept: list[dict[str, Tensor]] = []
    wrote = training._save

    def save() -> None:
        wrote()
        kept.append(read_tensors(tmp_path / LATEST / "model.safetensors"))

    monkeypatch.setattr(training, "_save", save)
    training.run()
    best = read_tensors(tmp_path / BEST / "model.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in kept[1].items())
    assert not all(torch.equal(best[name], tensor) for name, tensor in kept[2].items())


def test_an_existing_shard_is_reused(tmp_path):
    found = stored(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    dropped = sorted(times)[1]
    dropped.unlink()
    again = stored(tmp_path)
    changed = {path for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {dropped}
    assert len(again.sequences) == len(found.sequences) == len(sequences())


def test_states_of_other_sequences_are_refused(tmp_path):
    stored(tmp_path, per_shard=16)
    with pytest.raises(ModelError, match="use another folder"):
        stored(tmp_path, per_shard=8)


def test_padding_does_not_change_states():
    model = load_model(TARGET, "float32", CPU)
    short, long = sequences()[4], sequences()[0]
    together = states_of(model, [short, long], LAYERS)[0]
    alone = states_of(model, [short], LAYERS)[0]
    torch.testing.assert_close(together[2], alone[2], atol=1e-5, rtol=0)
    assert together[0].tolist() == short.tolist()
