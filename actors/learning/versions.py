"""Versions of the learned draft, in a folder that several processes share.

    versions/0001/          a complete draft checkpoint, usable as `draft.model`, and its manifest.json
    versions/current.json   {"version": 1}; absent or 0: the configured draft

A version is written to a hidden folder and then renamed, so it appears complete or not at all. `current.json` is also
replaced by a rename, and it alone decides which version is current: the states in the manifests are a record, which
`VersionFolder.history` reconciles with it. A crash between any two writes therefore leaves a valid folder. The rename
also claims the number, so two writers get different ones; changes of the current version take a lock.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from cluster.errors import ModelError
from cluster.learning import Manifest, State

VERSIONS = "versions"
CURRENT = "current.json"
MANIFEST = "manifest.json"
LOCK = ".lock"
PARTIAL = ".partial-"
NUMBER = re.compile(r"\d{4,}")
FOLDER_MODE = 0o700
FILE_MODE = 0o600
ABANDONED_S = 24 * 3600.0  # age after which a hidden folder's writer must have ended
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


class VersionFolder:
    """The versions in `folder`/versions. Version 0 is the configured draft and has no folder.

    Methods raise ModelError, which names the path and the fix, for unreadable files and failed writes. They block on
    the disk: call them in a thread.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = folder / VERSIONS
        self._clock = clock  # returns Unix time, in seconds

    # ------------------------------------------------------------ reading

    def current(self) -> int:
        """Returns the number of the current version; 0 is the configured draft."""
        path = self._root / CURRENT
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise _bad_current(path, str(error)) from error
        version = content.get("version") if isinstance(content, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise _bad_current(path, f"it holds {str(content)[:80]}")
        return version

    def folder_of(self, version: int) -> Path:
        """Returns the checkpoint folder of a version above 0."""
        assert version > 0, "version 0 is the configured draft, which is elsewhere"
        found = self._path(version)
        if not found.is_dir():
            raise ModelError(f"there is no version folder {found}; promote another version, or roll back")
        return found

    def manifest_of(self, version: int) -> Manifest:
        """Returns the manifest of a version above 0, with the same state as in `history`."""
        return self._reconciled(self._stored_manifest(version), self.current())

    def history(self) -> list[Manifest]:
        """Returns all manifests, oldest version first."""
        current = self.current()
        return [self._reconciled(self._stored_manifest(version), current) for version in self._numbers()]

    def trained_to(self, target: str) -> int:
        """Returns the highest id among the examples that versions for this target were trained on; 0 without any."""
        return max((one.newest for one in self.history() if one.target == target), default=0)

    # ------------------------------------------------------------ writing

    def add(self, manifest: Manifest, write: Callable[[Path], None]) -> Manifest:
        """Adds a version without promoting it; returns its manifest with the assigned number.

        `write` fills an empty folder with the checkpoint. If it fails, nothing remains; its OSErrors, such as a full
        disk, are raised as ModelError.
        """
        partial = self._root / f"{PARTIAL}{uuid.uuid4().hex}"
        try:
            partial.mkdir(mode=FOLDER_MODE, parents=True)
            os.chmod(self._root, FOLDER_MODE)
            write(partial)
            added = self._claim(partial, manifest)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _failed_write(partial, error) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return added

    def promote(self, version: int) -> None:
        """Makes a version the current one; 0 returns to the configured draft."""
        with self._locked():
            previous = self.current()
            if version:
                self._stored_manifest(version)  # raises for a version that does not exist or cannot be read
            self._make_current(version)
            if previous != version:
                self._record(previous, State.REPLACED)
            self._record(version, State.CURRENT)

    def rollback(self, version: int | None = None) -> int:
        """Makes the parent of the current version current, and returns the number of the version that is then current.

        Skips ancestors that are missing or were rolled back themselves; the last one is the configured draft. With
        `version`, does nothing unless that version is current, so that several observers roll back once.
        """
        with self._locked():
            current = self.current()
            if not current or version not in (None, current):
                return current
            parent = self._usable_ancestor(current)
            self._record(current, State.ROLLED_BACK)
            self._make_current(parent)
            self._record(parent, State.CURRENT)
            return parent

    def remove_old(self, keep: int) -> list[int]:
        """Removes all but the latest `keep` versions, and returns the removed numbers.

        Keeps the current version, its parent, and the highest number, which is never used twice. Also removes folders
        left behind by killed writers.
        """
        with self._locked():
            numbers = self._numbers()
            kept = set(numbers[-max(1, keep) :])
            if current := self.current():
                kept |= {current, self._usable_ancestor(current)}
            removed = [number for number in numbers if number not in kept]
            for number in removed:
                self._remove(self._path(number))
        for partial in self._root.glob(f"{PARTIAL}*"):
            if self._clock() - _modified_s(partial) > ABANDONED_S:
                _discard(partial)
        return removed

    # ------------------------------------------------------------ helpers

    def _path(self, version: int) -> Path:
        return self._root / f"{version:04d}"

    def _numbers(self) -> list[int]:
        """Returns the numbers of all versions, in ascending order."""
        try:
            entries = [path.name for path in self._root.iterdir() if NUMBER.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ModelError(f"{self._root} cannot be read: {error}; check the volume and its permissions") from error
        return sorted(int(name) for name in entries)

    def _stored_manifest(self, version: int) -> Manifest:
        path = self.folder_of(version) / MANIFEST
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            why = "; ".join(str(error).splitlines()[:3])
            raise _bad_manifest(path, why) from error
        if manifest.version != version:
            raise _bad_manifest(path, f"it is that of version {manifest.version}")
        return manifest

    def _reconciled(self, manifest: Manifest, current: int) -> Manifest:
        """Corrects a state that a crash left inconsistent with `current`."""
        state = manifest.state
        if manifest.version == current:
            state = State.CURRENT
        elif state is State.CURRENT:
            state = State.REPLACED
        return manifest.model_copy(update={"state": state})

    def _usable_ancestor(self, version: int) -> int:
        """Returns the closest ancestor that exists and was not rolled back; 0 if there is none."""
        parent = self._stored_manifest(version).parent
        while parent and self._path(parent).is_dir():
            manifest = self._stored_manifest(parent)
            if manifest.state is not State.ROLLED_BACK:
                return parent
            parent = manifest.parent
        return 0

    def _claim(self, partial: Path, manifest: Manifest) -> Manifest:
        """Renames a complete hidden folder to the next free number."""
        state = State.REJECTED if manifest.state is State.REJECTED else State.CANDIDATE
        _secure(partial)
        number = max(self._numbers(), default=0) + 1
        while True:
            numbered = manifest.model_copy(update={"version": number, "state": state})
            _write(partial / MANIFEST, numbered.model_dump_json(indent=2))
            _sync(partial)
            try:
                partial.rename(self._path(number))
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
                number += 1
            else:
                _sync(self._root)
                return numbered

    def _make_current(self, version: int) -> None:
        _replace(self._root / CURRENT, json.dumps({"version": version}))

    def _record(self, version: int, state: State) -> None:
        """Records a version's state, unless its manifest is missing or broken; version 0 has none."""
        try:
            manifest = self._stored_manifest(version) if version else None
        except ModelError:
            return
        if manifest is not None and manifest.state is not state:
            changed = manifest.model_copy(update={"state": state})
            _replace(self._path(version) / MANIFEST, changed.model_dump_json(indent=2))

    def _remove(self, folder: Path) -> None:
        """Renames a version's folder out of the way, then deletes its files."""
        gone = self._root / f"{PARTIAL}{uuid.uuid4().hex}"
        try:
            folder.rename(gone)
        except OSError as error:
            raise ModelError(f"{folder} cannot be removed: {error}; remove it by hand") from error
        shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock on the current version, across threads and processes."""
        path = self._root / LOCK
        try:
            self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise _failed_write(path, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:  # the volume does not support locks
                raise _failed_write(path, error) from error
            yield
        finally:
            os.close(descriptor)


def _bad_current(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} does not name the current version: {why};"
        ' write {"version": 0} to it for the configured draft, or the number of a version'
    )


def _bad_manifest(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is not a version's manifest: {why}; restore it, or remove its folder")


def _failed_write(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be written: {error}; check free space, permissions and the volume")


def _secure(folder: Path) -> None:
    """Restricts a folder's files to their owner and syncs them to disk."""
    for parent, _, files in os.walk(folder):
        os.chmod(parent, FOLDER_MODE)
        for name in files:
            path = Path(parent, name)
            if path.is_symlink():
                raise ModelError(f"{path} is a link, but a version holds all of its files; write a copy instead")
            os.chmod(path, FILE_MODE)
            _sync(path)
        _sync(Path(parent))


def _write(path: Path, text: str) -> None:
    """Writes a file readable by its owner only and syncs it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader gets the old content or the new."""
    beside = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    try:
        _write(beside, text)
        beside.replace(path)
        _sync(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise _failed_write(path, error) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
