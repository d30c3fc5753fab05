"""Trainable heads against those that serve, and what they learn."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.compute.hidden_states import encode_rows
from actors.drafters.heads import mlp_speculator
from actors.drafters.heads.eagle.config import NO_OVERRIDES
from actors.drafters.heads.files import read_head
from actors.learning.evaluation import do_nothing
from actors.learning.head_loading import load_eagle, load_medusa, load_mlp_speculator, states_kind
from actors.learning.head_trainee import HeadLearning, HeadTrainee, LoadedHead, StatesFile, rows_with_states
from actors.learning.trainable import RowLimits
from actors.learning.trainee import TrainingOptions
from actors.learning.training import train
from cluster.config import DraftPool
from cluster.config_sections import EagleOptions
from cluster.errors import ModelError
from cluster.learning import Example, Figures, SessionScore
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.drafters.heads.eagle_fixtures import (
    CPU,
    TARGET,
    TOLERANCE,
    Drive,
    altered,
    case,
    checkpoint,
    loaded,
)

EAGLE3 = ("eagle3", "eagle3_speculators")
HEADS = (*EAGLE3, "medusa", "mlp_speculator")
STEPS = 3


def loader(name: str) -> Callable[[Path], LoadedHead]:
    """Returns the loader of a fixture's kind of head."""
    if name == "medusa":
        return partial(load_medusa, target=TARGET)
    if name == "mlp_speculator":
        return partial(load_mlp_speculator, target=TARGET)
    return partial(load_eagle, target=TARGET, overrides=NO_OVERRIDES, is_projected=False)


def a_head(name: str) -> LoadedHead:
    return loader(name)(checkpoint(name))


@pytest.mark.parametrize("name", EAGLE3)
def test_a_published_head_is_trained_as_it_drafts(name: str) -> None:
    known = case(name)
    drive = Drive(loaded(checkpoint(name)))
    after = drive.prefill(known)
    length = len(known["input_ids"])
    tokens, logits, _ = drive.chain(after, length, STEPS)
    head = a_head(name)
    text = torch.cat([known["input_ids"], known["next_token"].reshape(1), tokens])
    states = torch.zeros(1, len(text), head.project(known["features"]).shape[-1])
    states[0, :length] = head.project(known["features"])
    found = list(head.network.unroll(text.unsqueeze(0), states, STEPS))
    assert head.token_ids.tolist() == drive.head.token_ids.tolist()
    for step in range(STEPS):
        own = found[step][0, length - 1] @ head.network.lm_head_of(step).T
        torch.testing.assert_close(own, logits[step], atol=TOLERANCE, rtol=0)


def test_medusa_heads_are_trained_as_they_draft() -> None:
    head = a_head("medusa")
    states = case("medusa")["features"].unsqueeze(0)
    expected = case("medusa")["medusa_logits_all"]
    found = list(head.network.unroll(torch.zeros(1, 12, dtype=torch.long), states, 9))
    assert len(found) == head.steps == len(expected)
    for step, outputs in enumerate(found):
        torch.testing.assert_close(outputs[0] @ head.network.lm_head_of(step).T, expected[step], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scales_input", [False, True])
def test_a_speculator_is_trained_as_it_drafts(scales_input: bool, tmp_path: Path) -> None:
    known = case("mlp_speculator")
    folder = altered(tmp_path, "mlp_speculator", scale_input=scales_input)
    head = loader("mlp_speculator")(folder)
    serving = mlp_speculator.load_mlp_speculator(folder, TARGET, torch.float32, CPU, range(96))
    text = torch.cat([torch.zeros(1).long(), known["next_token"].reshape(1), known["chain_tokens"]])
    states = torch.stack([known["features"], *torch.zeros(len(text) - 1, 32)])
    found = list(head.network.unroll(text.unsqueeze(0), states.unsqueeze(0), 9))
    assert len(found) == head.steps == STEPS
    state = known["features"].unsqueeze(0)
    for step, outputs in enumerate(found):
        expected = serving.predict_next(state, [int(text[step + 1])], step)
        assert expected.hidden is not None
        state = expected.hidden
        own = outputs[0, :1] @ head.network.lm_head_of(step).T
        torch.testing.assert_close(own, expected.logits, atol=TOLERANCE, rtol=0)


def test_heads_that_share_the_target_s_lm_head_do_not_train_it(tmp_path: Path) -> None:
    """vLLM's layout, with one block for each of two heads."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"blocks.{head}.layers.0.weight": tensors[f"{head}.0.linear.weight"] for head in range(2)}

    head = loader("medusa")(altered(tmp_path, "medusa", change, original_lm_head=True))
    trained = {name for name, each in head.network.named_parameters() if each.requires_grad}
    assert {head.names[name] for name in trained} == {"blocks.0.layers.0.weight", "blocks.1.layers.0.weight"}
    assert head.network.lm_head_of(0) is head.network.lm_head_of(1)


def test_a_merged_model_s_other_tensors_are_left_out(tmp_path: Path) -> None:
    def merge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"medusa_head.{name}": each for name, each in tensors.items()} | {"model.norm.weight": torch.ones(32)}

    head = loader("medusa")(altered(tmp_path, "medusa", merge))
    assert all(name.startswith("medusa_head.") for name in head.files.tensors)
    assert set(head.names.values()) == head.files.tensors.keys()


@pytest.mark.parametrize("name", ["eagle1"])
def test_a_head_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="does not learn"):
        a_head(name)


def test_states_belong_to_a_head_and_the_layers_that_it_reads(tmp_path: Path) -> None:
    def double_fc(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 2 * tensor if "fc" in name else tensor for name, tensor in tensors.items()}

    def kind(head: Path, states: tuple[int, ...] | None = None) -> str:
        return states_kind(DraftPool(method="eagle", model=str(head), eagle=EagleOptions(states=states)), TARGET)

    head = checkpoint("eagle3")
    copy = tmp_path / "copy"
    shutil.copytree(head, copy)
    other = tmp_path / "other"
    other.mkdir()
    assert kind(head) == kind(copy)
    assert len({kind(head), kind(head, (1, 2, 3)), kind(altered(other, "eagle3", double_fc))}) == 3


def test_rows_end_where_states_end_and_begin_where_they_begin() -> None:
    example = Example(tuple(range(10)), tuple(range(10, 30)), session="s")
    limits = RowLimits(6, 8)
    rows = rows_with_states(example, 0, 28, limits)
    assert [row.tokens[-row.predicted :] for row in rows] == [
        tuple(range(10, 18)),
        tuple(range(18, 26)),
        (26, 27, 28, 29),
    ]
    assert [row.first for row in rows] == [4, 12, 20]
    (row,) = rows_with_states(example, 11, 14, limits)
    assert (row.first, row.tokens, row.predicted) == (11, (11, 12, 13, 14, 15), 3)
    assert rows_with_states(example, 0, 0, limits) == rows_with_states(example, 0, 8, limits) == []
    (row,) = rows_with_states(example, 0, 9, RowLimits(1, 8))
    assert (row.first, row.tokens) == (8, (8, 9, 10))


# ---------------------------------------------------------------- learning

LAYOUT = StatesFormat(96, StateDtype.BFLOAT16)  # three states of the target, 32 wide
FINAL = StatesFormat(32, StateDtype.BFLOAT16)  # its final state


def layout_of(name: str) -> StatesFormat:
    return LAYOUT if name in EAGLE3 else FINAL


def walks(count: int, states: StatesFile, layout: StatesFormat = LAYOUT, seed: int = 0) -> list[Example]:
    """Random texts in which each token is a function of the token two positions before."""
    drawn = torch.Generator().manual_seed(seed)
    table = torch.randn(96, layout.width, generator=torch.Generator().manual_seed(1))
    found = []
    for index in range(count):
        text = [int(torch.randint(96, (), generator=drawn))]
        text += torch.randint(96, (5,), generator=drawn).tolist()
        while len(text) < 26:
            text.append((3 * text[-2] + 1) % 96)
        rows = table[torch.tensor(text)]
        states.add(f"{seed}/{index}", 0, encode_rows(rows[:-2], layout.dtype).numpy().tobytes())
        found.append(Example(tuple(text[:6]), tuple(text[6:]), session=f"{seed}/{index}"))
    return found


OPTIONS = TrainingOptions(epochs=12, learning_rate=5e-3, batch=8, warmup_steps=4, draft_tokens=3, evaluations=1)


def figures(trainee: HeadTrainee, examples: list[Example]) -> Figures:
    return Figures.of(trainee.score(examples, OPTIONS, do_nothing))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_learns_and_keeps_its_projection_and_layout(name: str, tmp_path: Path) -> None:
    start = checkpoint(name)
    layout = layout_of(name)
    with StatesFile(tmp_path, layout) as states:
        learned, held_out = walks(64, states, layout), walks(16, states, layout, seed=1)
        stateless = [replace(example, session="") for example in learned[:4]]
        trainee = HeadLearning("", layout, loader(name)).trainee(states)
        result = train(start, tmp_path / "out", [*learned, *stateless], held_out, [], OPTIONS, load=trainee)
        before, after = (figures(trainee(folder, CPU), held_out) for folder in (start, tmp_path / "out"))  # type: ignore[arg-type]
    assert result.is_complete
    assert before.agreement < 0.2
    assert after.agreement > before.agreement + 0.3
    assert after.tokens_per_verify > before.tokens_per_verify
    first, second = read_head(start), read_head(tmp_path / "out")
    assert second.config == first.config
    kept = {key: tensor for key, tensor in first.tensors.items() if torch.equal(tensor, second.tensors[key])}
    assert first.tensors.keys() == second.tensors.keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {each.dtype for each in first.tensors.values()} == {each.dtype for each in second.tensors.values()}
    assert any("fc" in key for key in kept) == (name in EAGLE3)
    assert len(kept) < len(first.tensors) / 2


def test_a_block_has_no_more_tokens_than_a_head_predicts(tmp_path: Path) -> None:
    """Five Medusa heads with zero weights always predict token 0, but cannot continue a block."""
    folder = altered(tmp_path, "medusa", lambda tensors: {name: 0 * tensor for name, tensor in tensors.items()})
    with StatesFile(tmp_path, FINAL) as states:
        states.add("s", 0, encode_rows(torch.zeros(20, 32), FINAL.dtype).numpy().tobytes())
        trainee = HeadTrainee(loader("medusa")(folder), states, CPU)
        (score,) = trainee.score(
            [Example((0, 0), (0,) * 18, session="s")], replace(OPTIONS, draft_tokens=16), do_nothing
        )
    assert score == SessionScore(tokens=18, agreed=18, verifies=3)


def test_an_example_without_states_scores_nothing(tmp_path: Path) -> None:
    with StatesFile(tmp_path, LAYOUT) as states:
        trainee = HeadTrainee(a_head("eagle3"), states, CPU)
        assert trainee.score([Example((1, 2), (3, 4))], OPTIONS, do_nothing) == [SessionScore(0, 0, 0)]
