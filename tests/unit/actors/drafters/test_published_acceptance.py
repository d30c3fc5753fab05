"""The figure that a draft's folder promises."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.drafters.loading import FIGURE, published_acceptance
from cluster.config import DraftPool
from cluster.errors import ModelError


def promised(folder: Path, **config: Any) -> float | None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5, **config}))
    return published_acceptance(DraftPool(method="draft_model", model=str(folder)))


def test_a_folder_may_promise_a_share_of_first_tokens(tmp_path: Path) -> None:
    assert promised(tmp_path, **{FIGURE: 0.6}) == 0.6
    assert promised(tmp_path) is None
    assert published_acceptance(DraftPool(method="ngram")) is None


@pytest.mark.parametrize("figure", [0, 1.1, -0.5, "0.6"])
def test_what_is_no_share_is_refused(tmp_path: Path, figure: object) -> None:
    with pytest.raises(ModelError, match="expected a share above 0 and up to 1; correct it or remove it"):
        promised(tmp_path, **{FIGURE: figure})
