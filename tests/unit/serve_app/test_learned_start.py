"""A drafter whose draft learns starts with the current version, or else with the configured draft."""

import logging
from pathlib import Path

import pytest

from actors.learning.reload import LearnedDraft, Version
from actors.learning.versions import CURRENT, VERSIONS, VersionFolder
from cluster.config import DraftPool, LearningOptions
from cluster.errors import ModelError
from cluster.learning import Manifest, State
from serve_app import startup
from serve_app.startup import learned_draft

TARGET = "fingerprint"


@pytest.fixture
def learned(tmp_path: Path) -> LearnedDraft:
    """Version 1 is current."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"first_token_acceptance": 0.6}')
    options = LearningOptions(folder=str(tmp_path / "learning"))
    found = learned_draft(DraftPool(model=str(draft), learning=options), TARGET)
    manifest = Manifest(
        version=1,
        parent=0,
        created=0.0,
        state=State.CANDIDATE,
        reason="better",
        method="draft_model",
        target=TARGET,
        examples=300,
        tokens=17_000,
        seconds=60.0,
    )
    found.versions.add(manifest, lambda folder: (folder / "config.json").touch())
    found.versions.promote(1)
    return found


def started(learned: LearnedDraft, broken: int | None = None) -> Version | None:
    """Returns the version that a drafter starts with, if version `broken` cannot be loaded."""

    def create(version: Version | None) -> tuple[None, Version | None]:
        if version.number == broken:
            raise ModelError(f"{version.folder} holds NaN or infinite weights")
        return None, version

    return startup._create_current(learned, create)[1]  # type: ignore[arg-type]


def test_the_current_version_starts(learned: LearnedDraft) -> None:
    version = started(learned)
    assert (version.number, version.folder) == (1, learned.versions.folder_of(1))
    assert version.first_token_acceptance is None, "that of the configured draft is not its own"


def test_without_a_version_the_configured_draft_starts(learned: LearnedDraft) -> None:
    learned.versions.promote(0)
    assert started(learned) == learned.configured
    assert learned.configured.first_token_acceptance == 0.6


@pytest.mark.parametrize("fault", ["weights", "current", "manifest"])
def test_an_unreadable_version_gives_way_to_the_configured_draft(
    learned: LearnedDraft, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    versions = tmp_path / "learning" / VERSIONS
    path = {"current": versions / CURRENT, "manifest": versions / "0001" / "manifest.json"}.get(fault)
    if path is not None:
        path.write_text("{")
    with caplog.at_level(logging.ERROR):
        assert started(learned, broken=1 if fault == "weights" else None) == learned.configured
    (record,) = caplog.records
    assert record.message.startswith("starting with the configured draft, since its current version cannot be used: ")


def test_a_version_of_another_target_does_not_start(learned: LearnedDraft, caplog: pytest.LogCaptureFixture) -> None:
    other = LearnedDraft(learned.versions, learned.configured, "another")
    assert started(other) == learned.configured
    assert "learned from target fingerprint, but this target is another" in caplog.text


def test_a_broken_configured_draft_fails_the_start(learned: LearnedDraft) -> None:
    learned.versions.promote(0)
    with pytest.raises(ModelError, match="NaN"):
        started(learned, broken=0)


def test_a_draft_that_does_not_learn_has_no_versions() -> None:
    assert learned_draft(DraftPool(method="ngram"), TARGET) is None
    assert VersionFolder(Path("/nowhere")).current() == 0
