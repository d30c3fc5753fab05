"""Tests training of a draft: learning, retention and stopping."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from actors.drafters.model.recurrent_head import FILE as RECURRENT_HEAD
from actors.learning.draft_trainee import DraftTrainee
from actors.learning.evaluation import score_draft
from actors.learning.trainable import Checkpoint, Row, cross_entropy, fingerprint_of, load_trainable
from actors.learning.trainee import TrainingOptions, TrainingPass
from actors.learning.training import TrainingProgress, TrainingResult, train
from cluster.errors import ModelError
from cluster.learning import Example, Figures
from tests.unit.actors.learning.drafts import CPU, HIDDEN, full_disk, some_examples, write_draft

QUICK = TrainingOptions(epochs=3, learning_rate=5e-3, batch=2, warmup_steps=2, pass_tokens=40)


def trained(start: Path, out: Path, examples: list[Example], options: TrainingOptions = QUICK, **more: Any) -> Any:
    held_out = more.pop("held_out", [])
    replay = more.pop("replay", [])
    return train(start, out, examples, held_out, replay, options, **more)


def agreement(draft: Path, examples: list[Example]) -> float:
    return Figures.of(score_draft(draft, examples, 4)).agreement


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_learns_its_examples_and_rehearses_others(tied: bool, tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start", width=3, tied=tied)
    examples, replay = some_examples(6), some_examples(6, seed=1)
    options = replace(QUICK, epochs=50, batch=6, learning_rate=1e-2, pass_tokens=1000)
    result = trained(start, tmp_path / "out", examples, options, replay=replay)
    assert result.steps == result.best_step == 50
    assert agreement(start, examples) < 0.2
    assert agreement(tmp_path / "out", examples) > 0.9
    assert agreement(tmp_path / "out", replay) > 0.9
    scores = score_draft(tmp_path / "out", examples, 2)
    assert Figures.of(scores).tokens_per_verify > 2.3, "the recurrent head learns too"


def test_only_tokens_that_the_draft_proposes_are_learned(tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start", width=2, frequent=[7, 3, 9, 1, 4])
    examples = [Example((1, 2), (3, 30, 4, 31, 9, 7, 3, 9)), Example((5,), (33,))]
    trained(start, tmp_path / "out", examples, replace(QUICK, epochs=40, learning_rate=1e-2, pass_tokens=1000))
    (score, _) = score_draft(tmp_path / "out", examples, 4)
    assert score.agreed == 6


def test_the_result_is_a_complete_draft_in_the_stored_types(tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start", width=3, frequent=[*range(20)], dtype=torch.bfloat16)
    (start / "tokenizer.json").write_text("{}")
    trained(start, tmp_path / "out", some_examples(4))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in start.iterdir()}
    for name in ("model.safetensors", RECURRENT_HEAD):
        before, after = load_file(start / name), load_file(tmp_path / "out" / name)
        assert {key: (each.dtype, each.shape) for key, each in after.items()} == {
            key: (each.dtype, each.shape) for key, each in before.items()
        }
        assert not all(torch.equal(before[key], after[key]) for key in before)
    assert load_trainable(tmp_path / "out", CPU).width == 3


def test_replay_has_its_share_and_each_row_its_turn(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class RecordingTrainee(DraftTrainee):
        def passes(self, rows: Sequence[Row], options: TrainingOptions, rng: np.random.Generator) -> list[TrainingPass]:
            seen.extend(row.tokens for row in rows)
            return super().passes(rows, options, rng)

    examples, replay = some_examples(6), some_examples(5, seed=1)
    options = replace(QUICK, epochs=1, batch=2, replay_share=0.6)
    start = write_draft(tmp_path / "start")
    trained(start, tmp_path / "out", examples, options, replay=replay, load=RecordingTrainee)
    counts = {each: seen.count((*each.prompt, *each.answer)) for each in (*examples, *replay)}
    assert [counts[each] for each in examples] == [1] * 6
    assert sorted(counts[each] for each in replay) == [1, 2, 2, 2, 2]


def test_the_sliced_loss_is_the_cross_entropy() -> None:
    torch.manual_seed(0)
    states = torch.randn(1031, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    labels = torch.randint(11, (len(states),))
    loss, agreed = cross_entropy(states, weight, labels)
    found = torch.autograd.grad(3 * loss, (states, weight))
    logits = states @ weight.T
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(3 * expected, (states, weight)), atol=1e-4, rtol=1e-4)
    assert torch.equal(agreed, logits.argmax(dim=1) == labels)


# ---------------------------------------------------------------- early stopping


def test_training_ends_when_held_out_examples_no_longer_improve(tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start", width=3)
    options = replace(QUICK, epochs=50, evaluations=1, patience=2)
    held_out = some_examples(20, seed=5)
    result = trained(start, tmp_path / "out", some_examples(8), options, held_out=held_out)
    assert result.is_complete
    assert result.steps < 200
    assert result.after.tokens_per_verify >= result.before.tokens_per_verify
    assert Figures.of(score_draft(tmp_path / "out", held_out, 4)) == result.after


def test_a_start_that_training_only_makes_worse_is_kept(tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start")
    examples = some_examples(6)
    learning = replace(QUICK, epochs=40, batch=6, learning_rate=1e-2, pass_tokens=1000)
    trained(start, tmp_path / "good", examples, learning)
    other = [Example(each.prompt, tuple(39 - token for token in each.answer)) for each in examples]
    options = replace(QUICK, epochs=10, patience=2)
    result = trained(tmp_path / "good", tmp_path / "out", other, options, held_out=examples)
    assert (result.best_step, result.after) == (0, result.before)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("good", "out"))
    assert all(torch.equal(one[key], two[key]) for key in one)


# ---------------------------------------------------------------- interruptions


class Killed(Exception):
    pass


def kill_at(step: int) -> Callable[[TrainingProgress], None]:
    def progress(now: TrainingProgress) -> None:
        if now.step == step:
            raise Killed

    return progress


def same_weights(one: Path, other: Path) -> bool:
    pairs = ((load_file(one / name), load_file(other / name)) for name in ("model.safetensors", RECURRENT_HEAD))
    return all(torch.equal(mine[key], theirs[key]) for mine, theirs in pairs for key in mine)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "start", width=3)


ALWAYS = replace(QUICK, save_every_s=0.0, patience=100)


def test_a_killed_training_continues_to_the_same_weights(start: Path, tmp_path: Path) -> None:
    examples, held_out = some_examples(8), some_examples(4, seed=1)
    whole = trained(start, tmp_path / "whole", examples, ALWAYS, held_out=held_out)
    state = tmp_path / "state"
    for step in (3, 4, 8):
        with pytest.raises(Killed):
            trained(start, tmp_path / "out", examples, ALWAYS, held_out=held_out, state=state, progress=kill_at(step))
        assert not (tmp_path / "out").exists()
    steps: list[int] = []
    result = trained(
        start,
        tmp_path / "out",
        examples,
        ALWAYS,
        held_out=held_out,
        state=state,
        progress=lambda now: steps.append(now.step),
    )
    assert steps[0] == 8, "the state of step 7 was the last that was saved"
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert (result.steps, result.best_step, result.after) == (whole.steps, whole.best_step, whole.after)
    assert not (state / "state.safetensors").exists()


def test_stopping_saves_the_state_and_writes_nothing(start: Path, tmp_path: Path) -> None:
    examples = some_examples(8)
    calls = iter(range(100))
    stopped = trained(start, tmp_path / "out", examples, state=tmp_path / "state", should_stop=lambda: next(calls) > 20)
    assert not stopped.is_complete
    assert 0 < stopped.steps < 12
    assert not (tmp_path / "out").exists()
    result: TrainingResult = trained(start, tmp_path / "out", examples, state=tmp_path / "state")
    trained(start, tmp_path / "whole", examples)
    assert result.is_complete
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("case", ["other options", "other states", "cut off", "not a state", "other start"])
def test_a_state_that_does_not_fit_is_not_used(case: str, start: Path, tmp_path: Path) -> None:
    examples = some_examples(8)
    state = tmp_path / "state"
    with pytest.raises(Killed):
        trained(start, tmp_path / "out", examples, ALWAYS, state=state, progress=kill_at(5))
    changes = {"other options": {"seed": 1}, "other states": {"states_kind": "other"}}
    options = replace(ALWAYS, **changes.get(case, {}))
    if case == "cut off":
        (state / "state.safetensors").write_bytes((state / "state.safetensors").read_bytes()[:5000])
    if case == "not a state":
        (state / "state.safetensors").write_text("hello")
    if case == "other start":
        weights = load_file(start / "model.safetensors")
        weights["model.norm.weight"] += 0.1
        save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    steps: list[int] = []
    trained(start, tmp_path / "out", examples, options, state=state, progress=lambda now: steps.append(now.step))
    assert steps[0] == 1


def test_the_training_state_is_private(start: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        trained(start, tmp_path / "out", some_examples(4), ALWAYS, state=tmp_path / "state", progress=kill_at(3))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "state.safetensors").stat().st_mode & 0o777 == 0o600


def test_it_pauses_before_every_pass(start: Path, tmp_path: Path) -> None:
    pauses: list[None] = []
    seen: list[TrainingProgress] = []
    trained(start, tmp_path / "out", some_examples(8), pause=lambda: pauses.append(None), progress=seen.append)
    assert len(seen) == 12
    assert len(pauses) >= 12
    assert [now.step for now in seen] == list(range(1, 13))
    assert {now.steps for now in seen} == {12}
    assert all(now.loss > 0 and 0 <= now.agreement <= 1 and now.seconds > 0 for now in seen)


# ---------------------------------------------------------------- bad input


def test_a_diverging_training_raises_and_writes_nothing(start: Path, tmp_path: Path) -> None:
    options = replace(ALWAYS, learning_rate=1e30, clip=1e30)
    with pytest.raises(ModelError, match="training diverged at step"):
        trained(start, tmp_path / "out", some_examples(8), options, state=tmp_path / "state")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "state" / "state.safetensors").exists(), "the next training starts over"


def test_bad_input_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no examples to train on"):
        trained(start, tmp_path / "out", [Example((1, 2), ())])
    with pytest.raises(ModelError, match="replay_share is 1;"):
        trained(start, tmp_path / "out", some_examples(2), replace(QUICK, replay_share=1.0))
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ModelError, match="cannot be trained; use a draft model with the Llama"):
        trained(start, tmp_path / "out", some_examples(2))


def test_a_draft_with_mask_tokens_is_refused_unless_it_has_a_recurrent_head(start: Path, tmp_path: Path) -> None:
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"pard_token": 7}))
    trained(start, tmp_path / "out", some_examples(2))
    (start / RECURRENT_HEAD).unlink()
    with pytest.raises(ModelError, match=r"mask tokens \(PARD\), which does not learn"):
        trained(start, tmp_path / "out", some_examples(2))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pth"])
def test_a_fingerprint_changes_with_weights_and_configuration(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = set()
    for content in ("one", "other"):
        (tmp_path / f"weights{suffix}").write_text(content)
        found.add(fingerprint_of(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found.add(fingerprint_of(tmp_path))
    assert len(found) == 3
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "README.md").write_text("a draft")
    assert fingerprint_of(tmp_path) in found, "a version may be the configured draft, and its manifest changes"


@pytest.mark.parametrize("file", ["state", "draft"])
def test_a_full_disk_raises_and_leaves_nothing_partial(file: str, start: Path, tmp_path: Path) -> None:
    state = tmp_path / "state" if file == "state" else None
    with full_disk(4000), pytest.raises(ModelError, match=f"{'state' if state else 'out'}.* cannot be written"):
        trained(start, tmp_path / "out", some_examples(4), ALWAYS, state=state)
    left = [path for path in tmp_path.rglob("*") if start not in (path, *path.parents)]
    assert left == ([] if state is None else [state])


def test_weights_under_other_names_are_refused(start: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(start)
    draft = load_trainable(start, CPU)
    draft.model.model.norm.weight = torch.nn.Parameter(torch.ones(HIDDEN))
    checkpoint.rounded(draft)
    draft.model.model.further = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"stores model\.further\.weight under another name"):
        checkpoint.rounded(draft)
