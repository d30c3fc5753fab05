"""After any failure, the folder of a learned draft names a complete version."""

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.learning.versions import VersionFolder
from cluster.errors import ModelError
from cluster.learning import Manifest, State
from tests.unit.actors.learning.drafts import full_disk

WEIGHTS = "model.safetensors"


def a_manifest(parent: int = 0, state: State = State.CANDIDATE, version: int = 1) -> Manifest:
    return Manifest(
        version=version,
        parent=parent,
        created=1.0,
        state=state,
        reason="better",
        method="draft_model",
        target="print",
        examples=300,
        tokens=17_000,
        seconds=60.0,
    )


def writes(content: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "more").mkdir()
        (folder / "more" / "tokenizer.json").write_text("{}")
        (folder / WEIGHTS).write_text(content)

    return write


def add(folder: VersionFolder, parent: int = 0, *, promote: bool = True) -> int:
    version = folder.add(a_manifest(parent), writes()).version
    if promote:
        folder.promote(version)
    return version


def states(folder: VersionFolder) -> dict[int, State]:
    return {manifest.version: manifest.state for manifest in folder.history()}


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "versions").iterdir()}


# ---------------------------------------------------------------- without faults


def test_without_a_folder_the_configured_draft_is_current(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path / "absent")
    assert folder.current() == 0
    assert folder.history() == []
    assert folder.rollback() == 0


def test_an_added_version_is_complete_private_and_not_current(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path / "learning")
    added = folder.add(a_manifest(version=7), writes("new"))
    assert (added.version, added.state) == (1, State.CANDIDATE)
    assert folder.current() == 0
    assert (folder.folder_of(1) / WEIGHTS).read_text() == "new"
    assert folder.history() == [added]
    for parent, folders, files in os.walk(tmp_path / "learning" / "versions"):
        assert {stat.S_IMODE(os.stat(Path(parent, name)).st_mode) for name in folders} <= {0o700}
        assert {stat.S_IMODE(os.stat(Path(parent, name)).st_mode) for name in files} <= {0o600}


def test_a_promoted_version_replaces_the_one_before(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1)
    folder.add(a_manifest(2, State.REJECTED), writes())
    assert folder.current() == 2
    assert states(folder) == {1: State.REPLACED, 2: State.CURRENT, 3: State.REJECTED}
    assert folder.manifest_of(2).parent == 1
    folder.promote(0)
    assert folder.current() == 0
    assert states(folder) == {1: State.REPLACED, 2: State.REPLACED, 3: State.REJECTED}


def test_rollbacks_go_from_parent_to_parent(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1)
    add(folder, parent=2)
    assert [folder.rollback() for _ in range(4)] == [2, 1, 0, 0]
    assert set(states(folder).values()) == {State.ROLLED_BACK}


def test_a_rollback_skips_ancestors_that_were_rolled_back_or_are_gone(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1)
    folder.rollback()
    add(folder, parent=2)  # trained from 2 while 2 was in use
    assert folder.rollback() == 1
    add(folder, parent=1)
    shutil.rmtree(folder.folder_of(1))
    assert folder.rollback() == 0


def test_concurrent_observers_roll_back_a_bad_version_once(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1)
    assert folder.rollback(2) == 1
    assert folder.rollback(2) == 1


def test_old_versions_go_but_neither_the_current_one_nor_its_parent_nor_the_highest_number(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1)
    for _ in range(4):
        add(folder, parent=2, promote=False)
    assert folder.remove_old(keep=2) == [3, 4]
    assert list(states(folder)) == [1, 2, 5, 6]
    assert folder.remove_old(keep=0) == [5]
    assert folder.rollback() == 1
    assert add(folder) == 7


def test_partial_folders_go_once_their_writer_must_have_ended(tmp_path: Path) -> None:
    now = [0.0]
    folder = VersionFolder(tmp_path, clock=lambda: now[0])
    add(folder)
    partial = tmp_path / "versions" / ".partial-left"
    partial.mkdir()
    now[0] = partial.stat().st_mtime + 60
    folder.remove_old(4)
    assert partial.is_dir()
    now[0] += 7 * 86_400
    folder.remove_old(4)
    assert not partial.exists()


# ---------------------------------------------------------------- faults


class Killed(BaseException):
    """Simulated end of a process between two steps."""


def killed_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Kills the process before its `step`-th disk change, without cleanup."""
    steps = 0

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps >= step:
                raise Killed
            return function(*args, **options)

        return counted

    patch.setattr(shutil, "rmtree", before(shutil.rmtree))
    patch.setattr(os, "open", before(os.open))
    patch.setattr(os, "fsync", before(os.fsync))
    patch.setattr(os, "chmod", before(os.chmod))
    patch.setattr(Path, "mkdir", before(Path.mkdir))
    patch.setattr(Path, "rename", before(Path.rename))
    patch.setattr(Path, "replace", before(Path.replace))
    patch.setattr(Path, "unlink", before(Path.unlink))


CHANGES: dict[str, Callable[[VersionFolder], object]] = {
    "add": lambda folder: folder.add(a_manifest(2), writes()),
    "promote": lambda folder: folder.promote(3),
    "rollback": lambda folder: folder.rollback(),
    "remove": lambda folder: folder.remove_old(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_crash_at_any_step_leaves_a_valid_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    for step in range(1, 200):
        root = tmp_path / str(step)
        folder = VersionFolder(root)
        add(folder)
        add(folder, parent=1)
        add(folder, parent=2, promote=False)
        add(folder, parent=2, promote=False)
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            try:
                CHANGES[change](folder)
                break
            except Killed:
                pass
        current = folder.current()
        assert current in {"add": {2}, "promote": {2, 3}, "rollback": {1, 2}, "remove": {2}}[change]
        found = states(folder)
        assert [version for version, state in found.items() if state is State.CURRENT] == [current]
        for version in found:
            assert (folder.folder_of(version) / WEIGHTS).read_text() == "weights"
        assert add(folder, parent=current) == max(found) + 1
        assert folder.rollback() == current
    else:
        raise AssertionError("the change takes more steps than that")
    assert step > 3, "no step was interrupted"


def test_a_full_disk_leaves_no_half_version(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    before = names(tmp_path)

    def write(partial: Path) -> None:
        (partial / WEIGHTS).write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"cannot be written: .*No space left on device; check free space"):
        folder.add(a_manifest(1), write)
    assert names(tmp_path) == before
    assert folder.current() == 1


def test_a_full_disk_keeps_the_current_version(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    add(folder, parent=1, promote=False)
    with full_disk(0), pytest.raises(ModelError, match="cannot be written"):
        folder.promote(2)
    assert folder.current() == 1
    assert names(tmp_path) == {"0001", "0002", "current.json", ".lock"}


def test_a_failed_training_leaves_no_half_version_and_its_own_error(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        raise ValueError("the loss is NaN")

    with pytest.raises(ValueError, match="the loss is NaN"):
        VersionFolder(tmp_path).add(a_manifest(), write)
    assert names(tmp_path) == set()


def test_a_link_is_refused_because_its_file_may_change(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("weights")
    outside.chmod(0o644)
    folder = VersionFolder(tmp_path)
    with pytest.raises(ModelError, match="is a link"):
        folder.add(a_manifest(), lambda partial: (partial / WEIGHTS).symlink_to(outside))
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": "1"}', '{"version": true}', '{"version": -1}', "{}", "\xff"]
)
def test_a_broken_current_file_is_named_with_a_remedy(tmp_path: Path, content: str) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    path = tmp_path / "versions" / "current.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=rf'{path} does not name the current version: .*write {{"version": 0}} to it'):
        folder.current()


def broken(change: dict[str, object]) -> str:
    return json.dumps(a_manifest().model_dump(mode="json") | change)


@pytest.mark.parametrize(
    "content", ["", "{", broken({"version": 2}), broken({"state": "fine"}), broken({"surplus": 1})]
)
def test_a_broken_manifest_is_named_with_a_remedy(tmp_path: Path, content: str) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    path = folder.folder_of(1) / "manifest.json"
    path.write_text(content)
    for read in (folder.history, lambda: folder.manifest_of(1), folder.rollback, lambda: folder.promote(1)):
        with pytest.raises(ModelError, match=rf"(?s){path} is not a version's manifest: .*; restore it, or remove"):
            read()
    assert folder.current() == 1
    folder.promote(0)
    assert folder.current() == 0


def test_an_unknown_version_is_not_promoted(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    add(folder)
    with pytest.raises(ModelError, match=r"0002; promote another version"):
        folder.promote(2)
    assert folder.current() == 1


def test_writers_at_once_get_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All writers list the folder before any of them claims a number."""
    writers = 4
    folder = VersionFolder(tmp_path)
    together = threading.Barrier(writers)
    listed = Path.iterdir

    def all_listed(path: Path) -> Iterator[Path]:
        found = list(listed(path))
        together.wait(10)
        return iter(found)

    added: list[int] = []

    def work(name: str) -> None:
        version = folder.add(a_manifest(), writes(name)).version
        assert (folder.folder_of(version) / WEIGHTS).read_text() == name
        added.append(version)

    threads = [threading.Thread(target=work, args=(str(index),)) for index in range(writers)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", all_listed)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(added) == [1, 2, 3, 4]
    assert list(states(VersionFolder(tmp_path))) == [1, 2, 3, 4]
