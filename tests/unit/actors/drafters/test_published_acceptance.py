"""Acceptance rate published in a draft's config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.drafters.loading import FIGURE, published_acceptance
from cluster.config import DraftPool
from cluster.errors import ModelError


def published(folder: Path, **config: Any) -> float | None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5, **config}))
    return published_acceptance(DraftPool(method="draft_model", model=str(folder)))


def test_published_share_is_read_if_present(tmp_path: Path) -> None:
    assert published(tmp_path, **{FIGURE: 0.6}) == 0.6
    assert published(tmp_path) is None
    assert published_acceptance(DraftPool(method="ngram")) is None


@pytest.mark.parametrize("figure", [0, 1.1, -0.5, "0.6"])
def test_invalid_share_is_refused(tmp_path: Path, figure: object) -> None:
    with pytest.raises(ModelError, match="expected a share above 0 and up to 1; correct it or remove it"):
        published(tmp_path, **{FIGURE: figure})
