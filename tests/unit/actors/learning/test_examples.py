"""Tests the store of examples: bounds, near-duplicates, permissions and deletion."""

import random
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.learning.examples import FILE, ExampleStore, ExampleWriter
from cluster.errors import ConfigError
from cluster.learning import Example, Source

DAY_S = 86_400.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def an_example(seed: int, length: int = 64, key: str = "", version: str = "") -> Example:
    chosen = random.Random(seed)
    prompt = tuple(chosen.randrange(49_152) for _ in range(10))
    return Example(prompt, tuple(chosen.randrange(49_152) for _ in range(length)), Source(key, version))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ExampleStore]:
    opened = ExampleStore(tmp_path, max_tokens=1000, max_age_s=DAY_S, clock=clock)
    yield opened
    opened.close()


def holds(folder: Path, tokens: tuple[int, ...]) -> bool:
    """Returns whether any file contains four of the tokens in a row."""
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    return any(array("i", tokens[first : first + 4]).tobytes() in data for first in range(len(tokens) - 3))


def test_examples_come_back_by_target_and_in_order(store):
    ours = [an_example(seed, key="team", version="v2") for seed in range(3)]
    assert store.add(ours, "target") == {"kept": 3}
    store.add([an_example(9)], "other")
    assert store.read("target") == ours
    first = store.size("target").newest - 2
    assert store.read("target", after=first) == ours[1:]
    assert store.size("target", after=first).examples == 2


def test_a_near_duplicate_of_an_answer_counts_once_whatever_its_prompt(store):
    original = an_example(1)
    changed = list(original.answer)
    changed[0] += 1
    copies = [Example((index,), tuple(changed), Source(str(index))) for index in range(50)]
    assert store.add([original, *copies], "target") == {"kept": 1, "duplicate": 50}
    assert store.add([an_example(2)], "target") == {"kept": 1}


def test_the_oldest_examples_leave_when_there_are_too_many_tokens_or_too_old(store, clock):
    many = [an_example(seed) for seed in range(20)]  # 74 tokens each
    store.add(many, "target")
    assert store.read("target") == many[-13:]
    clock.now += 0.75 * DAY_S
    store.add([an_example(50)], "target")
    clock.now += 0.5 * DAY_S
    assert store.read("target") == [an_example(50)]
    store.add([an_example(51)], "target")
    assert store.size().examples == 2


def test_only_the_owner_may_read(store, tmp_path):
    store.add([an_example(1)], "target")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_forgotten_examples_leave_no_trace_in_the_files(store, tmp_path):
    ours = [an_example(seed, key="ours") for seed in range(5)]
    theirs = [an_example(seed, key="theirs") for seed in range(5, 10)]
    store.add(ours + theirs, "target")
    assert holds(tmp_path, ours[0].answer)
    assert store.forget("ours") == 5
    assert not any(holds(tmp_path, tokens) for each in ours for tokens in (each.prompt, each.answer))
    assert store.read("target") == theirs
    assert store.forget() == 5
    assert not any(holds(tmp_path, each.answer) for each in theirs)
    assert store.add(ours, "target") == {"kept": 5}  # also as duplicates they are forgotten


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"draft\.learning\.folder: cannot open .*file"):
        ExampleStore(tmp_path / "file", 1000, DAY_S)


def test_a_writer_keeps_what_it_was_offered_and_counts_what_it_could_not_keep(tmp_path):
    writer = ExampleWriter(lambda: ExampleStore(tmp_path, 1000, DAY_S), "target")
    for seed in range(3):
        writer.offer(an_example(seed))
    writer.close()
    assert writer.counts == {"kept": 3}

    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    broken = ExampleWriter(lambda: ExampleStore(tmp_path, 1000, DAY_S), "target")
    broken.offer(an_example(1))
    broken.close()
    assert broken.counts == {"failed": 1}
