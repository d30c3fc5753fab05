"""Acceptance rate that a draft's author publishes in its folder; drafters check themselves against it."""

import json

from actors.models.checkpoint import local_folder
from cluster.config import DraftPool
from cluster.errors import ModelError

FIGURE = "first_token_acceptance"


def published_acceptance(draft: DraftPool) -> float | None:
    """Returns the share of blocks whose first token the target accepts, from the draft's config.json.

    None if config.json does not state it. Raises ModelError if the value is not a share in (0, 1].
    """
    if draft.model is None:
        return None
    path = local_folder(draft.model, with_weights=False) / "config.json"
    figure = json.loads(path.read_text(encoding="utf-8")).get(FIGURE)
    if figure is None:
        return None
    if not isinstance(figure, int | float) or not 0 < figure <= 1:
        raise ModelError(
            f"{path}: {FIGURE} is {figure!r}, expected a share above 0 and up to 1; correct it or remove it"
        )
    return float(figure)
