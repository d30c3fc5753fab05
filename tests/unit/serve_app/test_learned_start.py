"""A drafter with a learning draft starts with the current version, or with the configured draft."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.learning.reload import DraftReload
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import checkpoint_fingerprint
from cluster.config import DraftPool, SlipstreamConfig, validated
from cluster.draft_quality import VersionWatch
from cluster.drafting.method import ExchangesWeights
from cluster.errors import ModelError
from cluster.learning import Comparison, Figures, Manifest, State
from serve_app.startup import learned_draft, start_drafter
from tests.broken_checkpoints import good_checkpoint


def a_manifest(target: str, agreement: float) -> Manifest:
    figures = Figures(sessions=20, agreement=agreement, tokens_per_verify=2.0)
    return Manifest(
        version=1,
        parent=0,
        created=0.0,
        state=State.CANDIDATE,
        reason="better",
        method="draft_model",
        target=target,
        examples=300,
        tokens=17_000,
        seconds=60.0,
        recent=Comparison(before=figures, after=figures, low=1.1, high=1.2),
    )


@pytest.fixture
def config(tmp_path: Path) -> SlipstreamConfig:
    """Configures a tiny pair with a learning draft, whose published acceptance is 0.6."""
    good_checkpoint(tmp_path / "target")
    path = good_checkpoint(tmp_path / "draft") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"first_token_acceptance": 0.6}))
    learning = {"folder": str(tmp_path / "learning")}
    draft = {"model": str(tmp_path / "draft"), "learning": learning, "max_sessions": 1}
    model = {"target": str(tmp_path / "target"), "dtype": "float32", "max_context": 64}
    return validated({"model": model, "draft": draft})


def unchanged(folder: Path) -> None:
    pass


def add(config: SlipstreamConfig, edit: Callable[[Path], object] = unchanged, target: str | None = None) -> int:
    """Promotes a copy of the configured draft, with changes, as a version."""
    assert config.draft.model is not None
    draft = Path(config.draft.model)

    def write(folder: Path) -> None:
        shutil.copytree(draft, folder, dirs_exist_ok=True)
        edit(folder)

    fingerprint = checkpoint_fingerprint(Path(config.model.target)) if target is None else target
    versions = VersionFolder(draft.with_name("learning"))
    added = versions.add(a_manifest(fingerprint, agreement=0.8), write)
    versions.promote(added.version)
    return added.version


def started(config: SlipstreamConfig) -> tuple[int, float | None]:
    """Returns the version and the published acceptance of a new drafter."""
    drafter = start_drafter([config])
    return drafter.version, drafter.first_token_acceptance


def test_a_drafter_starts_with_the_current_version(config: SlipstreamConfig) -> None:
    assert started(config) == (0, 0.6)
    add(config)
    assert started(config) == (1, 0.8)


@pytest.mark.parametrize("path", ["current.json", "0001/manifest.json", "0001/config.json"])
def test_an_unreadable_version_gives_way_to_the_configured_draft(
    config: SlipstreamConfig, tmp_path: Path, path: str
) -> None:
    add(config)
    (tmp_path / "learning" / "versions" / path).write_text("{")
    assert started(config) == (0, 0.6)


def test_a_version_of_another_target_does_not_start(config: SlipstreamConfig) -> None:
    add(config, target="another")
    assert started(config) == (0, 0.6)


def test_a_broken_configured_draft_fails_the_start(config: SlipstreamConfig, tmp_path: Path) -> None:
    add(config)
    cut_off(tmp_path / "draft")
    with pytest.raises(ModelError):
        start_drafter([config])


def test_a_draft_that_does_not_learn_has_no_versions() -> None:
    assert learned_draft(DraftPool(method="ngram"), "fingerprint") is None
    assert VersionFolder(Path("/nowhere")).current() == 0


# ---------------------------------------------------------------- manually promoted versions


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def changed(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def shaped(folder: Path, **shape: int) -> None:
    config = LlamaConfig.from_pretrained(folder)
    config.update(shape)
    LlamaForCausalLM(config).save_pretrained(folder)


FAULTS: dict[str, Callable[[Path], object]] = {
    "cut off": cut_off,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "not weights": lambda folder: (folder / "model.safetensors").write_text("hello"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "broken config": lambda folder: (folder / "config.json").write_text("{"),
    "a list as config": lambda folder: (folder / "config.json").write_text("[]"),
    "a tensor missing": lambda folder: changed(folder, lambda w: w.pop("model.norm.weight")),
    "a tensor too small": lambda folder: changed(
        folder, lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:5]})
    ),
    "NaN": lambda folder: changed(folder, lambda w: w["model.norm.weight"].fill_(torch.nan)),
    "huge": lambda folder: changed(folder, lambda w: w["model.layers.0.mlp.up_proj.weight"].fill_(3e38)),
    "other layers": lambda folder: shaped(folder, num_hidden_layers=3),
    "other heads": lambda folder: shaped(folder, num_key_value_heads=4),
    "other vocabulary": lambda folder: shaped(folder, vocab_size=20),
    "larger vocabulary": lambda folder: shaped(folder, vocab_size=1000),
}


class Serving:
    """Fake drafter that accepts exchanged weights between passes."""

    def __init__(self) -> None:
        self.version_watch = VersionWatch(0)

    async def exchange(self, exchange: Callable[[], object], version: int, _: float | None = None) -> object:
        self.version_watch.exchanged(version)
        return exchange()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_corrupt_version_promoted_by_hand_leaves_the_weights_in_use(
    fault: str, config: SlipstreamConfig, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = start_drafter([config])
    assert drafter.learned is not None
    assert isinstance(drafter.method, ExchangesWeights)
    reload = DraftReload(drafter.learned, drafter.method, Serving())
    add(config, FAULTS[fault])
    assert started(config)[0] == 0, "a new drafter starts with the configured draft"
    for _ in range(3):
        await reload.check()
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("actors") and each.levelno >= 30]
    assert "version 1 of the draft is refused, and version 0 stays: " in line
    assert "Error: " not in line, "an expected fault"
    assert (reload.version, reload.counts["refused"], reload.counts["swapped"]) == (0, 1, 0)
    good = add(config)
    await reload.check()
    assert reload.version == started(config)[0] == good
    reload.close()
