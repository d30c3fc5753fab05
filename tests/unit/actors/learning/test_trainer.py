"""Tests the trainer's rounds: what is promoted, what is not, and what happens when something fails."""

import fcntl
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.learning.examples import ExampleStore
from actors.learning.trainer import Draft, Trainer
from actors.learning.versions import VersionFolder
from cluster.config import LearningOptions
from cluster.learning import Example, State
from tests.unit.actors.learning.drafts import VOCABULARY, write_draft

TARGET = "target"


def walks(count: int, step: int = 1, seed: int = 0, regular: float = 0.9) -> list[Example]:
    """Returns answers in which most tokens exceed the one before by `step`: easy to learn, and no two alike."""
    chosen = random.Random(f"{step} {seed}")
    examples = []
    for _ in range(count):
        text = [chosen.randrange(VOCABULARY)]
        while len(text) < 36:
            follows = (text[-1] + step) % VOCABULARY
            text.append(follows if chosen.random() < regular else chosen.randrange(VOCABULARY))
        examples.append(Example(tuple(text[:4]), tuple(text[4:])))
    return examples


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


@pytest.fixture
def options(tmp_path: Path) -> LearningOptions:
    folder = str(tmp_path / "learning")
    return LearningOptions(folder=folder, min_examples=100, min_sessions=6, epochs=8, learning_rate=0.01)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def keep(options: LearningOptions, examples: list[Example], target: str = TARGET) -> int:
    """Stores examples; returns how many are new."""
    store = ExampleStore.of(options)
    outcomes = store.add(examples, target)
    store.close()
    return outcomes["kept"]


def trainer(
    options: LearningOptions,
    draft: Path,
    *,
    target: str = TARGET,
    replay: list[Example] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] | None = None,
) -> Trainer:
    of_draft = Draft(draft, "draft_model", target, draft_tokens=4)
    return Trainer(options, of_draft, replay or [], should_stop=should_stop, clock=clock or Clock())


def current(options: LearningOptions) -> int:
    return VersionFolder(Path(options.folder)).current()


def test_a_version_that_predicts_new_traffic_better_is_promoted_once(options, draft):
    made = trainer(options, draft)
    keep(options, walks(90))
    assert made.look() is None, "too few examples"
    keep(options, walks(60, seed=1))
    manifest = made.look()
    assert manifest is not None
    assert manifest.recent is not None
    assert manifest.recent.after.agreement > manifest.recent.before.agreement + 0.3
    assert (manifest.version, manifest.parent, current(options)) == (1, 0, 1)
    assert (made.status().counts, made.status().new_examples) == ({"promoted": 1}, 0)
    assert made.look() is None, "there are no new examples"


def test_the_next_version_starts_from_the_current_one_and_keeps_what_it_learned(options, draft):
    made = trainer(options, draft)
    keep(options, walks(150))
    assert made.look() is not None
    keep(options, walks(150, step=7))
    manifest = made.look()
    assert manifest is not None
    assert (manifest.parent, current(options)) == (1, 2)
    assert manifest.examples > 150, "older examples are trained on too"


def test_random_answers_promote_nothing(options, draft):
    keep(options, walks(150, regular=0.0))
    made = trainer(options, draft)
    manifest = made.look()
    assert manifest is not None
    assert manifest.state is State.REJECTED
    assert "reaches 1" in manifest.reason
    assert (made.status().counts, current(options)) == ({"rejected": 1}, 0)
    assert made.look() is None, "the same examples are not tried again"


def test_one_answer_repeated_many_times_is_one_example(options, draft):
    (answer,) = walks(1)
    assert keep(options, [Example((index,), answer.answer) for index in range(2000)]) == 1
    assert trainer(options, draft).look() is None


def test_a_version_that_forgets_is_rejected(options, draft):
    general = walks(100, step=7)
    made = trainer(options, draft, replay=general)
    keep(options, walks(150, step=7, seed=5))
    assert made.look() is not None
    assert current(options) == 1
    without_replay = options.model_copy(update={"replay_share": 0.0})
    keep(options, walks(400, step=1))
    forgetful = trainer(without_replay, draft, replay=general)
    manifest = forgetful.look()
    assert manifest is not None
    assert manifest.state is State.REJECTED
    assert "general examples" in manifest.reason
    assert current(options) == 1


def test_a_new_target_starts_over_from_the_configured_draft(options, draft):
    keep(options, walks(150))
    assert trainer(options, draft).look() is not None
    updated = trainer(options, draft, target="updated")
    assert updated.look() is None, "examples of the old target do not count"
    keep(options, walks(150, seed=3, step=7), "updated")
    manifest = updated.look()
    assert manifest is not None
    assert manifest.parent == 0


def break_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "break_it",
    [
        lambda options, draft: break_weights(draft),
        lambda options, draft: (draft / "config.json").write_text("{"),
        lambda options, draft: (draft / "model.safetensors").write_bytes(b"no weights"),
        lambda options, draft: (Path(options.folder) / "versions").write_text("a file"),
    ],
    ids=["nan weights", "broken config", "broken weights", "no room for versions"],
)
def test_a_failed_training_promotes_nothing_and_is_tried_again_later(options, draft, break_it, caplog):
    keep(options, walks(150))
    clock = Clock()
    made = trainer(options, draft, clock=clock)
    break_it(options, draft)
    assert made.look() is None
    assert made.look() is None
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    clock.now += 3600
    assert made.look() is None
    assert [record.levelname for record in caplog.records].count("ERROR") == 2


def test_a_diverging_training_promotes_nothing(options, draft):
    keep(options, walks(150))
    made = trainer(options.model_copy(update={"learning_rate": 1e30}), draft)
    manifest = made.look()
    assert manifest is None or manifest.state is State.REJECTED
    assert current(options) == 0


def test_a_stopped_training_goes_on_in_the_next_trainer(options, draft):
    keep(options, walks(150))
    steps = iter(range(1000))
    stopped = trainer(options, draft, should_stop=lambda: next(steps) > 10)
    assert stopped.look() is None
    assert stopped.status().counts == {"interrupted": 1}
    assert current(options) == 0
    assert trainer(options, draft).look() is not None
    assert current(options) == 1


def test_a_second_trainer_waits(options, draft):
    keep(options, walks(150))
    made = trainer(options, draft)
    with open(Path(options.folder) / "trainer.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert made.look() is None
        assert made.status().phase == "locked out"
    assert made.look() is not None


def test_what_is_promoted_is_a_whole_private_draft(options, draft):
    keep(options, walks(150))
    assert trainer(options, draft).look() is not None
    folder = VersionFolder(Path(options.folder)).folder_of(1)
    assert {path.name for path in draft.iterdir()} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "manifest.json").read_text())["target"] == TARGET
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
