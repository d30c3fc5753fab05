"""A drafter loads the current version of its draft, refuses broken versions and rolls back worse versions."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.learning.reload import DraftReload, LearnedDraft, Version
from actors.learning.versions import VersionFolder
from cluster.draft_quality import VersionWatch
from cluster.errors import ModelError
from cluster.learning import Comparison, Figures, Manifest, State

TARGET = "fingerprint"
DRAFT = "fingerprint of the configured draft"
CONFIGURED = Path("configured")


class Method:
    """Method that loads any folder with valid weights."""

    def __init__(self) -> None:
        self.used = CONFIGURED
        self.loaded: list[Path] = []
        self.threads: set[int] = set()

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        self.loaded.append(folder)
        self.threads.add(threading.get_ident())
        if folder != CONFIGURED and (content := (folder / "weights").read_text()) != "good":
            raise ModelError(f"{folder} holds {content} weights")

        def exchange() -> object:
            earlier = self.used
            self.used = folder
            return earlier

        return exchange


class Drafting:
    """Fake drafter with a version watch that records each exchanged version."""

    def __init__(self, version: int = 0) -> None:
        self.version_watch = VersionWatch(version)
        self.published: dict[int, float | None] = {}

    async def exchange(
        self, exchange: Callable[[], object], version: int, published_acceptance: float | None = None
    ) -> object:
        earlier = exchange()
        self.version_watch.exchanged(version)
        self.published[version] = published_acceptance
        return earlier

    def serve(self, accepted: int) -> None:
        """Verifies enough two-token blocks to judge a version; the target accepts `accepted` tokens of each."""
        for session in range(50):
            for _ in range(50):
                self.version_watch.block_verified(str(session), accepted, 2)


class World:
    """Folder of versions with one or several drafters."""

    def __init__(self, folder: Path, drafters: int = 1) -> None:
        self.versions = VersionFolder(folder)
        self.methods = [Method() for _ in range(drafters)]
        self.drafters = [Drafting() for _ in range(drafters)]
        draft = LearnedDraft(self.versions, Version(0, CONFIGURED, 0.7), TARGET, DRAFT)
        pairs = zip(self.methods, self.drafters, strict=True)
        self.reloads = [DraftReload(draft, method, drafter) for method, drafter in pairs]

    def add(
        self, content: str = "good", target: str = TARGET, agreement: float | None = None, draft: str = DRAFT
    ) -> int:
        figures = Figures(sessions=20, agreement=agreement or 0.0, tokens_per_verify=2.0)
        manifest = Manifest(
            version=1,
            parent=self.versions.current(),
            created=0.0,
            state=State.CANDIDATE,
            reason="better",
            method="draft_model",
            target=target,
            draft=draft,
            examples=300,
            tokens=17_000,
            seconds=60.0,
            recent=None if agreement is None else Comparison(before=figures, after=figures, low=1.1, high=1.2),
        )
        version = self.versions.add(manifest, lambda folder: _write(folder, content)).version
        self.versions.promote(version)
        return version

    async def check(self) -> None:
        for reload in self.reloads:
            await reload.check()

    @property
    def used(self) -> list[int]:
        return [reload.version for reload in self.reloads]


def _write(folder: Path, content: str) -> None:
    (folder / "weights").write_text(content)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_without_versions_nothing_happens(world: World) -> None:
    await world.check()
    assert world.methods[0].loaded == []
    assert world.reloads[0].counts == {"swapped": 0, "refused": 0, "rolled_back": 0, "failed": 0}


async def test_it_follows_promotions_and_rollbacks(world: World) -> None:
    (method,) = world.methods
    for expected in (1, 2):
        world.add()
        await world.check()
        await world.check()
        assert world.used == [expected]
        assert method.used == world.versions.folder_of(expected)
    for expected in (1, 0):
        world.versions.rollback()
        await world.check()
        assert world.used == [expected]
    assert method.used == CONFIGURED
    assert len(method.loaded) == 4
    assert world.reloads[0].counts["swapped"] == 4


async def test_a_version_comes_with_its_own_acceptance(world: World) -> None:
    world.add(agreement=0.8)
    await world.check()
    world.add()
    await world.check()
    world.versions.promote(0)
    await world.check()
    assert world.drafters[0].published == {1: 0.8, 2: None, 0: 0.7}


@pytest.mark.parametrize(
    ("content", "target", "draft", "why"),
    [
        ("NaN", TARGET, DRAFT, "holds NaN weights"),
        ("good", "other", DRAFT, "evaluate it on this target"),
        ("good", TARGET, "other", "set draft.model to that draft"),
    ],
)
async def test_a_version_that_cannot_be_used_is_refused_once(
    world: World, caplog: pytest.LogCaptureFixture, content: str, target: str, draft: str, why: str
) -> None:
    world.add()
    await world.check()
    world.add(content, target, draft=draft)
    caplog.clear()
    for _ in range(3):
        await world.check()
    assert world.used == [1]
    assert world.reloads[0].counts["refused"] == 1
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "version 2 of the draft is refused, and version 1 stays: " in record.message
    assert why in record.message
    world.add()
    await world.check()
    assert world.used == [3]


async def test_a_version_of_an_earlier_release_fits_any_draft(world: World) -> None:
    world.add(draft="")
    await world.check()
    assert world.used == [1]


async def test_the_drafter_continues_after_any_load_failure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    version = world.add()
    (world.versions.folder_of(version) / "weights").unlink()
    await world.check()
    await world.check()
    assert world.used == [0]
    (record,) = caplog.records
    assert "refused" in record.message
    assert "FileNotFoundError" in record.message


async def test_an_unreadable_folder_is_reported_once_and_read_again(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.add()
    await world.check()
    caplog.clear()
    path = tmp_path / "versions" / "current.json"
    path.write_text("{")
    for _ in range(3):
        await world.check()
    assert world.used == [1]
    assert world.reloads[0].counts["failed"] == 3
    (record,) = caplog.records
    assert f"version 1 of the draft stays in use: {path} does not name" in record.message
    path.unlink()
    world.add()
    await world.check()
    assert world.used == [2]


async def test_a_version_that_drafts_worse_is_rolled_back_by_the_first_who_sees_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, drafters=2)
    world.add()
    await world.check()
    for drafter in world.drafters:
        drafter.serve(accepted=2)
    world.add()
    await world.check()
    assert world.used == [2, 2]
    caplog.clear()
    for drafter in world.drafters:
        drafter.serve(accepted=0)
    await world.check()
    assert world.used == [1, 1]
    assert [reload.counts["rolled_back"] for reload in world.reloads] == [1, 0]
    assert {each.version: each.state for each in world.versions.history()} == {
        1: State.CURRENT,
        2: State.ROLLED_BACK,
    }
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "rolled back draft version 2 to 1: its acceptance is 0.00, the previous version's 1.00" in record.message


async def test_a_version_as_good_as_the_one_before_stays(world: World) -> None:
    world.drafters[0].serve(accepted=1)
    world.add()
    await world.check()
    world.drafters[0].serve(accepted=1)
    await world.check()
    assert world.used == [1]
    assert world.versions.current() == 1


async def test_the_configured_draft_is_never_rolled_back(world: World) -> None:
    world.add()
    await world.check()
    world.drafters[0].serve(accepted=2)
    world.versions.promote(0)
    await world.check()
    world.drafters[0].serve(accepted=0)
    await world.check()
    assert world.used == [0]
    assert world.reloads[0].counts["rolled_back"] == 0


async def test_a_rollback_that_cannot_be_written_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.drafters[0].serve(accepted=2)
    world.add()
    await world.check()
    world.drafters[0].serve(accepted=0)

    def read_only(version: int | None = None) -> int:
        raise ModelError("the volume is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(world.versions, "rollback", read_only)
        await world.check()
        await world.check()
    assert world.used == [1]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "version 1 of the draft stays in use: the volume is read-only"
    ]
    await world.check()
    assert world.used == [0]


async def test_loading_does_not_block_the_loop(world: World) -> None:
    (method,) = world.methods
    world.add()
    going_on = threading.Event()
    prepare = method.prepare_weights

    def slow(folder: Path) -> Callable[[], object]:
        assert going_on.wait(10), "the loop is blocked"
        return prepare(folder)

    method.prepare_weights = slow  # type: ignore[method-assign]
    checking = asyncio.create_task(world.check())
    await asyncio.sleep(0)
    going_on.set()
    await checking
    assert world.used == [1]
    assert threading.get_ident() not in method.threads


async def test_it_looks_every_period(tmp_path: Path) -> None:
    world = World(tmp_path)
    slept: list[float] = []

    class Stopped(Exception):
        pass

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.add()
        if len(slept) == 3:
            raise Stopped

    draft = LearnedDraft(world.versions, Version(0, CONFIGURED), TARGET, DRAFT)
    reload = DraftReload(draft, world.methods[0], world.drafters[0], 7.0, sleep=sleep)
    with pytest.raises(Stopped):
        await reload.run()
    assert slept == [7.0] * 3
    assert reload.version == 2
    reload.close()
