"""What is served: the model's names, and a fingerprint of all that decides its answers beside the request."""

import hashlib
import time
from collections.abc import Sequence
from importlib import metadata

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from serve_app.http.wire.replies import ModelCard, ModelList

DISTRIBUTION = "slipstream-serving"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


def version() -> str:
    return metadata.version(DISTRIBUTION)


def model_list(config: SlipstreamConfig) -> ModelList:
    """A card for each name."""
    created = int(time.time())
    context = config.model.max_context
    cards = (
        ModelCard(id=name, created=created, root=config.model.name, max_model_len=context)
        for name in config.served_names
    )
    return ModelList(data=tuple(cards))


def check_model(name: str, served: Sequence[str]) -> None:
    """Raises UnknownModelError for a name that is none of those served."""
    if name not in served:
        known = ", ".join(f"'{one}'" for one in served)
        raise UnknownModelError(f"model '{name}' does not exist; {known} is served", "model")


def find_card(models: ModelList, name: str) -> ModelCard:
    """The card of a name."""
    check_model(name, [card.id for card in models.data])
    return next(card for card in models.data if card.id == name)


def fingerprint(config: SlipstreamConfig, checkpoint: str) -> str:
    """Of version, weights, dtype and split: with the same one, a seed gives the same answer. Drafts have no say."""
    decisive = (version(), checkpoint or config.model.target, config.model.dtype, config.target.tensor_parallel)
    return f"fp_{hashlib.sha256(repr(decisive).encode()).hexdigest()[:12]}"
