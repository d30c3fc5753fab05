"""Tests the store of examples: bounds, near-duplicates, permissions and deletion."""

import random
import sqlite3
import stat
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.learning.examples import ExampleStore, ExampleWriter, KeptStates, StateRecorder
from cluster.errors import ConfigError
from cluster.learning import Example, Source
from protos.messages import Open
from tests.unit.actors.learning.drafts import full_disk, holding

DAY_S = 86_400.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def an_example(seed: int, length: int = 64, key: str = "", version: str = "", session: str = "") -> Example:
    chosen = random.Random(seed)
    prompt = tuple(chosen.randrange(49_152) for _ in range(10))
    return Example(prompt, tuple(chosen.randrange(49_152) for _ in range(length)), Source(key, version), session)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ExampleStore]:
    opened = ExampleStore(tmp_path, max_tokens=1000, max_age_s=DAY_S, max_state_bytes=1000, clock=clock)
    yield opened
    opened.close()


def holds(folder: Path, tokens: tuple[int, ...]) -> bool:
    return bool(holding(folder, tokens))


def test_examples_come_back_by_target_and_in_order(store):
    ours = [an_example(seed, key="team", version="v2") for seed in range(3)]
    assert store.add(ours, "target") == {"kept": 3}
    store.add([an_example(9)], "other")
    assert store.read("target") == ours
    first = store.size("target").newest - 2
    assert store.read("target", after=first) == ours[1:]
    assert store.size("target", after=first).examples == 2


def test_near_duplicate_answers_count_once_for_any_prompt(store):
    original = an_example(1)
    changed = list(original.answer)
    changed[0] += 1
    copies = [Example((index,), tuple(changed), Source(str(index))) for index in range(50)]
    assert store.add([original, *copies], "target") == {"kept": 1, "duplicate": 50}
    assert store.add([an_example(2)], "target") == {"kept": 1}


def test_a_new_target_s_answers_are_kept_although_the_earlier_one_gave_the_same(store):
    """Otherwise a draft learns nothing from repeated requests after an update of its target."""
    store.add([an_example(1)], "earlier target")
    assert store.add([an_example(1), an_example(1)], "target") == {"kept": 1, "duplicate": 1}
    assert store.read("target") == [an_example(1)]


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
    assert store.add(ours, "target") == {"kept": 5}  # evicted examples do not count as duplicates


def test_a_file_of_an_earlier_version_is_opened_with_its_examples(tmp_path):
    """The first version knew no sessions and no states."""
    earlier = sqlite3.connect(tmp_path / "examples.sqlite")
    earlier.executescript(
        "CREATE TABLE examples (id INTEGER PRIMARY KEY AUTOINCREMENT, created REAL NOT NULL, target TEXT NOT NULL,"
        " key TEXT NOT NULL, prompt_version TEXT NOT NULL, tokens INTEGER NOT NULL, prompt BLOB NOT NULL,"
        " answer BLOB NOT NULL); CREATE TABLE bands (hash INTEGER PRIMARY KEY, example INTEGER NOT NULL"
        " REFERENCES examples (id) ON DELETE CASCADE);"
    )
    prompt, answer = (array("i", tokens).tobytes() for tokens in ((1, 2), (3, 4, 5)))
    earlier.execute("INSERT INTO examples VALUES (7, ?, 'target', 'key', '', 5, ?, ?)", (time.time(), prompt, answer))
    earlier.commit()
    earlier.close()
    for new in (1, 2):
        store = ExampleStore(tmp_path, 10_000, DAY_S)
        store.add([an_example(new, session=f"session-{new}")], "target")
        old, *_, latest = store.read("target")
        store.close()
        assert old == Example((1, 2), (3, 4, 5), Source("key"))
        assert latest.session == f"session-{new}"


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"draft\.learning\.folder: cannot open .*file"):
        ExampleStore(tmp_path / "file", 1000, DAY_S)


def test_a_writer_stores_offered_examples_and_counts_dropped_ones(tmp_path):
    writer = ExampleWriter(lambda: ExampleStore(tmp_path, 1000, DAY_S), "target")
    for seed in range(3):
        writer.offer(an_example(seed))
    writer.close()
    assert writer.counts == {"kept": 3}


def test_a_folder_that_breaks_costs_examples_one_log_line_and_a_count(tmp_path, caplog):
    (tmp_path / "examples.sqlite").mkdir()
    broken = ExampleWriter(lambda: ExampleStore(tmp_path, 1000, DAY_S), "target")
    broken.offer(an_example(1))
    broken.close()
    assert broken.counts == {"failed": 1}
    (record,) = caplog.records
    assert "examples.sqlite" in record.getMessage()


def test_a_full_disk_costs_examples_one_log_line_and_a_count(store, clock, tmp_path, caplog):
    store.add([an_example(0)], "target")
    writer = ExampleWriter(lambda: ExampleStore(tmp_path, 1_000_000, DAY_S, clock=clock), "target")
    with full_disk(64_000):
        for seed in range(1, 6):
            writer.offer(an_example(seed, length=8000))
        writer.close()
    assert writer.counts == {"failed": 5}
    (record,) = caplog.records
    assert "cannot keep sessions to learn from" in record.getMessage()
    later = ExampleWriter(lambda: ExampleStore(tmp_path, 1_000_000, DAY_S, clock=clock), "target")
    later.offer(an_example(9))
    later.close()
    assert later.counts == {"kept": 1}
    assert [each.prompt for each in store.read("target")] == [an_example(0).prompt, an_example(9).prompt]


def test_one_answer_with_small_changes_is_kept_a_few_times(tmp_path):
    """One token of 64 changes each time; without the near-duplicate limit, the client would own 91 % of all tokens."""
    roomy = ExampleStore(tmp_path, 1_000_000, DAY_S)
    roomy.add([an_example(seed, key="others") for seed in range(50)], "target")
    answer = an_example(1000).answer
    chosen = random.Random(1)
    repeated = []
    for index in range(500):
        at = chosen.randrange(64)
        changed = (*answer[:at], chosen.randrange(49_152), *answer[at + 1 :])
        repeated.append(Example((index,) * 10, changed, Source("spammer")))
    assert roomy.add(repeated, "target")["kept"] < 75
    key, share = roomy.largest_key()
    roomy.close()
    assert key in ("others", "spammer")
    assert share < 0.7


def kept(session: str, rows: bytes = b"\x01\x02" * 50, first: int = 3) -> KeptStates:
    return KeptStates(session, "2 bfloat16", first, rows)


def sessions(store: ExampleStore, *names: str) -> list[str]:
    """Returns the given sessions that have states."""
    return [name for name in names if store.states_of(name)]


def test_states_are_found_by_session_and_kind_and_the_longer_ones_stay(store):
    assert store.add_states([kept("a"), kept("b", b"xy")]) == {"kept": 2}
    assert (store.states_of("a"), store.states_of("c")) == (kept("a"), None)
    store.add_states([kept("a", b"short", 7), kept("b", b"longer", 7)])
    assert (store.states_of("a"), store.states_of("b")) == (kept("a"), kept("b", b"longer", 7))
    examples = [an_example(seed, session=name) for seed, name in enumerate("abc")]
    store.add(examples, "target")
    assert store.read("target", kind="2 bfloat16") == examples[:2]
    assert store.size("target", kind="2 bfloat16").examples == 2
    assert store.read("target", kind="4 bfloat16") == []


def test_an_answer_whose_states_an_earlier_head_read_is_collected_again(store, clock):
    store.add_states([kept("a")])
    store.add([an_example(1, session="a")], "target")
    clock.now += 1
    store.add_states([KeptStates(name, "4 bfloat16", 3, b"wider") for name in "bc"])
    again = [an_example(1, session=name) for name in "bc"]
    assert store.add(again, "target") == {"kept": 1, "duplicate": 1}
    assert store.read("target") == store.read("target", kind="4 bfloat16") == again[:1]
    assert sessions(store, *"abc") == ["b", "c"]


def test_states_leave_with_their_example_and_soon_without_one(store, clock):
    store.add_states([kept(name) for name in "abcd"])
    store.add(
        [an_example(1, key="team", session="a"), an_example(2, session="b"), an_example(2, session="c")], "target"
    )
    assert sessions(store, *"abcd") == ["a", "b", "c", "d"]
    clock.now += DAY_S / 2
    store.sweep()
    assert sessions(store, *"abcd") == ["a", "b"], "that of a near-duplicate and that of no example are gone"
    store.forget("team")
    assert sessions(store, *"abcd") == ["b"]
    clock.now += DAY_S
    store.sweep()
    assert sessions(store, *"abcd") == []


def test_states_that_are_written_again_are_new(store, clock):
    store.add_states([kept("a", b"xy")])
    clock.now += 3600
    store.add_states([kept("a")])
    assert sessions(store, "a") == ["a"], "their example may still come"


def test_forgetting_leaves_nothing_of_states_on_disk(store, tmp_path):
    secret = bytes(range(60, 200))
    store.add([an_example(1, session="a")], "target")
    store.add_states([kept("a", secret), kept("its example is still to come", secret)])
    assert any(secret in path.read_bytes() for path in tmp_path.iterdir())
    store.forget()
    assert not any(secret[:20] in path.read_bytes() for path in tmp_path.iterdir())


def test_the_oldest_states_leave_when_there_are_too_many_bytes(store, clock):
    for name in "abc":
        clock.now += 1
        store.add([an_example(ord(name), length=8, session=name)], "target")
        store.add_states([kept(name, b"x" * 400)])
    assert sessions(store, *"abc") == ["b", "c"]
    assert store.size().examples == 3


def an_open(session: str, prompt: int = 10, may_learn: bool = True) -> Open:
    measured = Open.measured(session, tuple(range(prompt)), prompt + 50, 4)
    return replace(measured, may_learn=may_learn)


def test_a_recorder_writes_only_sessions_that_may_become_examples(store, tmp_path):
    recorder = StateRecorder(lambda: ExampleStore(tmp_path, 1000, DAY_S, 1000), "2 bfloat16", row_bytes=4)
    for name, may_learn in (("yes", True), ("no", False), ("open", True)):
        recorder.open(an_open(name, may_learn=may_learn))
        recorder.states(name, 8, b"abcdefgh")
        recorder.states(name, 10, b"ijkl")
    recorder.states("unknown", 0, b"abcd")
    recorder.close(["yes", "no", "unknown"])
    recorder.end()
    assert sessions(store, "yes", "no", "open", "unknown") == ["yes"]
    assert store.states_of("yes") == kept("yes", b"abcdefghijkl", 8)
    assert recorder.counts == {"kept": 1}


def test_a_recorder_skips_the_states_of_a_long_prompts_beginning(store, tmp_path):
    recorder = StateRecorder(lambda: ExampleStore(tmp_path, 1000, DAY_S, 10_000), "2 bfloat16", row_bytes=4)
    recorder.open(an_open("a", prompt=1000))
    for first in range(0, 1000, 100):
        recorder.states("a", first, b"".join(position.to_bytes(4, "little") for position in range(first, first + 100)))
    recorder.close(["a"])
    recorder.end()
    found = store.states_of("a")
    assert found is not None
    assert found.first + len(found.rows) // 4 == 1000
    assert 0 < found.first < 990
    assert found.rows[:4] == found.first.to_bytes(4, "little")


def test_at_least_half_of_the_kept_states_are_of_the_answer(tmp_path):
    """512 states of a prompt in 16 KiB each would fill a session's 8 MiB."""
    row_bytes, prompt = 16_384, 600
    recorder = StateRecorder(lambda: ExampleStore(tmp_path, 1000, DAY_S, 20 << 20), "8192 bfloat16", row_bytes)
    recorder.open(an_open("a", prompt))
    for first, count in ((0, prompt), (prompt, 200), (prompt + 200, 200), (prompt + 400, 1)):
        recorder.states("a", first, bytes(count * row_bytes))
    recorder.close(["a"])
    recorder.end()
    store = ExampleStore(tmp_path, 1000, DAY_S, 20 << 20)
    found = store.states_of("a")
    store.close()
    assert found is not None
    assert (found.first, len(found.rows)) == (prompt - 256, 512 * row_bytes)
