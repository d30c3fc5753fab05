"""Tests the trainer's rounds: promoted versions, rejected versions, and failures."""

import json
import logging
import random
import re
import signal
import subprocess
import sys
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
from tests.unit.actors.learning.drafts import VOCABULARY, full_disk, write_draft

TARGET = "target"


def walks(count: int, step: int = 1, seed: int = 0, regular: float = 0.9) -> list[Example]:
    """Returns distinct, easily learned answers, in which most tokens exceed the previous token by `step`."""
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
    """Stores examples; returns the number of new ones."""
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


def test_it_waits_for_enough_held_out_examples_and_logs_how_many_are_missing(options, draft, caplog):
    few = options.model_copy(update={"min_examples": 30, "min_sessions": 10})
    made = trainer(few, draft)
    with caplog.at_level(logging.INFO):
        keep(few, walks(40))
        assert made.look() is None
        assert made.look() is None
        (record,) = caplog.records
        assert re.fullmatch(r"the next training needs about \d+ more examples", record.getMessage())
        keep(few, walks(110, seed=1))
        assert made.look() is not None
    keep(few, walks(35, seed=2, step=7))
    manifest = made.look()
    assert manifest is not None
    assert manifest.recent is not None
    assert manifest.recent.after.sessions == 10, "older held-out examples fill up"


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


def test_another_draft_starts_over_from_itself(options, draft, tmp_path):
    keep(options, walks(150))
    assert trainer(options, draft).look() is not None
    keep(options, walks(150, seed=3, step=7))
    manifest = trainer(options, write_draft(tmp_path / "wider", width=3)).look()
    assert manifest is not None
    assert manifest.parent == 0


def break_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the messages of log lines with level warning or above."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda options, draft: break_weights(draft), "NaN or infinite"),
        (lambda options, draft: (draft / "config.json").write_text("{"), "config.json"),
        (lambda options, draft: (draft / "model.safetensors").write_bytes(b"no weights"), "model.safetensors"),
        (lambda options, draft: (Path(options.folder) / "versions").write_text("a file"), "versions"),
        (lambda options, draft: (Path(options.folder) / "examples.sqlite").write_text("text" * 99), "examples.sqlite"),
    ],
    ids=["nan weights", "broken config", "broken weights", "no room for versions", "broken examples"],
)
def test_a_failed_training_promotes_nothing_and_is_tried_again_later(options, draft, break_it, why, caplog):
    keep(options, walks(150))
    clock = Clock()
    made = trainer(options, draft, clock=clock)
    break_it(options, draft)
    assert made.look() is None
    assert made.look() is None
    (line,) = errors(caplog)
    assert "the draft is unchanged" in line
    assert why in line
    assert made.status().counts == {"failed": 1}
    clock.now += 3600
    assert made.look() is None
    assert made.status().counts == {"failed": 2}
    clock.now += 700
    assert made.look() is None
    assert made.status().counts == {"failed": 2}, "each failure in a row doubles the pause"


def test_a_broken_record_of_a_version_leaves_the_trainer_alive(options, draft, caplog):
    keep(options, walks(150))
    clock = Clock()
    made = trainer(options, draft, clock=clock)
    assert made.look() is not None
    before = made.status()
    keep(options, walks(150, step=7))
    manifest = VersionFolder(Path(options.folder)).folder_of(1) / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:40])
    assert made.look() is None
    (line,) = errors(caplog)
    assert "restore it, or remove its folder" in line
    assert made.status().version == before.version
    assert made.status().counts == {"promoted": 1, "failed": 1}
    manifest.write_bytes(whole)
    clock.now += 3600
    assert made.look() is not None


def test_a_diverging_training_promotes_nothing(options, draft, caplog):
    keep(options, walks(150))
    made = trainer(options.model_copy(update={"learning_rate": 1e38}), draft)
    assert made.look() is None
    (line,) = errors(caplog)
    assert "training diverged at step" in line
    assert made.status().counts == {"failed": 1}
    assert current(options) == 0
    assert files(options) == {"examples.sqlite", "trainer.lock"}


def files(options: LearningOptions) -> set[str]:
    folder = Path(options.folder)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_promotes_nothing_and_leaves_no_part_of_a_version(options, draft, caplog):
    keep(options, walks(150))
    clock = Clock()
    made = trainer(options, draft, clock=clock)
    with full_disk(10_000):
        assert made.look() is None
    (line,) = errors(caplog)
    assert "cannot be written" in line
    assert made.status().counts == {"failed": 1}
    assert current(options) == 0
    assert files(options) == {"examples.sqlite", "trainer.lock"}
    clock.now += 3600
    assert made.look() is not None
    assert current(options) == 1


def test_a_stopped_training_goes_on_in_the_next_trainer(options, draft):
    keep(options, walks(150))
    steps = iter(range(1000))
    stopped = trainer(options, draft, should_stop=lambda: next(steps) > 10)
    assert stopped.look() is None
    assert stopped.status().counts == {"interrupted": 1}
    assert current(options) == 0
    successor = trainer(options, draft)
    assert successor.look() is not None
    assert successor.status().counts == {"promoted": 1}, "it was not killed"
    assert current(options) == 1


KILLED = """
import os, signal, sys, time
from pathlib import Path

import torch

from actors.learning.trainer import Draft, Trainer
from cluster.config import LearningOptions

torch.set_num_threads(1)  # as in the tests: another number of threads rounds differently
passes = 0
times = iter(range(0, 10**9, 20))
time.monotonic = lambda: float(next(times))  # 20 s per reading, so every other step saves the state


def killed_in_the_middle():
    global passes
    passes += 1
    if passes > 60:
        os.kill(os.getpid(), signal.SIGKILL)
    return False


options, draft = sys.argv[1:]
draft = Draft(Path(draft), "draft_model", "target", draft_tokens=4)
Trainer(LearningOptions.model_validate_json(options), draft, [], should_stop=killed_in_the_middle).look()
"""


def test_a_killed_trainer_is_continued_by_the_next_one(options, draft, caplog):
    keep(options, walks(150))
    child = [sys.executable, "-c", KILLED, options.model_dump_json(), str(draft)]
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    assert current(options) == 0
    assert VersionFolder(Path(options.folder)).history() == []
    with caplog.at_level(logging.INFO):
        made = trainer(options, draft)
        manifest = made.look()
    assert manifest is not None
    assert any("training continues after step" in record.getMessage() for record in caplog.records)
    (line,) = errors(caplog)
    assert "a trainer was killed during a training in" in line
    assert made.status().counts == {"killed": 1, "promoted": 1}
    assert current(options) == 1
    alone = options.model_copy(update={"folder": f"{options.folder}-alone"})
    keep(alone, walks(150))
    assert trainer(alone, draft).look() is not None
    continued, whole = (load_file(Path(one.folder, "versions/0001/model.safetensors")) for one in (options, alone))
    assert all(torch.equal(continued[name], whole[name]) for name in whole)
    assert files(options) == files(alone), "nothing of the killed trainer is left"


@pytest.mark.parametrize("left", ["candidate", ".candidate.partial"])
def test_no_file_of_a_killed_trainer_s_candidate_enters_a_version(options, draft, left):
    """The killed trainer may have trained another draft, here one that proposes half of the tokens."""
    keep(options, walks(150))
    write_draft(Path(options.folder, "training", left), frequent=list(range(VOCABULARY // 2)))
    assert trainer(options, draft).look() is not None
    version = VersionFolder(Path(options.folder)).folder_of(1)
    assert {path.name for path in version.iterdir()} == {"manifest.json", *(path.name for path in draft.iterdir())}


def test_the_second_of_two_trainers_waits(options, draft, caplog):
    keep(options, walks(150))
    second = trainer(options, draft)

    def other_looks() -> bool:
        assert second.look() is None
        return False

    first = trainer(options, draft, should_stop=other_looks)
    assert first.look() is not None
    (line,) = errors(caplog)
    assert "another trainer works in" in line
    assert (second.status().phase, second.status().counts) == ("locked out", {"locked_out": 1})
    assert [one.version for one in VersionFolder(Path(options.folder)).history()] == [1]
    assert second.look() is None, "the examples were trained on by the first"
    assert second.status().phase == "waiting"


def test_no_version_learns_from_examples_that_were_forgotten_meanwhile(options, draft):
    kept = walks(120, seed=1)
    calls = {"pass": 0, "clock": 0}

    def forget_at(what: str, call: int) -> None:
        calls[what] += 1
        if calls[what] == call:
            store = ExampleStore.of(options)
            store.forget()
            store.add(kept, TARGET)
            store.close()

    def should_stop() -> bool:
        forget_at("pass", 10)
        return False

    def clock() -> float:
        forget_at("clock", 3)  # after the second training, when its version is dated
        return 0.0

    keep(options, walks(150))
    made = trainer(options, draft, should_stop=should_stop, clock=clock)
    assert made.look() is None
    assert made.status().counts == {"interrupted": 1}
    made.look()
    assert made.status().counts == {"interrupted": 2}
    assert VersionFolder(Path(options.folder)).history() == []
    manifest = made.look()
    assert manifest is not None
    assert manifest.examples <= len(kept)


def test_a_promoted_version_is_complete_and_private(options, draft):
    keep(options, walks(150))
    assert trainer(options, draft).look() is not None
    folder = VersionFolder(Path(options.folder)).folder_of(1)
    assert {path.name for path in draft.iterdir()} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "manifest.json").read_text())["target"] == TARGET
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
