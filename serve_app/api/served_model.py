"""The served models: their names, and a fingerprint of the server state that affects answers."""

import hashlib
import json
import time
from collections.abc import Sequence
from importlib import metadata

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from serve_app.api.replies import ModelCard, ModelList

DISTRIBUTION = "slipstream-serving"
SERVER_FIELDS = {"generation_defaults", "allow_special_tokens_in_text", "response_template"}  # these affect answers


class UnknownModelError(RequestError):
    """Raised if the request names a model that is not served."""


def version() -> str:
    return metadata.version(DISTRIBUTION)


def model_list(config: SlipstreamConfig) -> ModelList:
    """Returns a model card for each served name and adapter."""
    created = int(time.time())
    cards = []
    for one in config.served:
        card = ModelCard(id=one.name, created=created, root=one.name, max_model_len=one.config.model.max_context)
        cards += [card.model_copy(update={"id": name}) for name in one.config.served_names]
        for name in one.config.target.adapters:
            cards.append(card.model_copy(update={"id": name, "root": name, "parent": one.name}))
    return ModelList(data=tuple(cards))


def check_model(name: str, served: Sequence[str]) -> None:
    """Raises UnknownModelError for a name that is not served."""
    if name not in served:
        names = ", ".join(f"'{one}'" for one in served)
        verb = "is" if len(served) == 1 else "are"
        raise UnknownModelError(f"model '{name}' does not exist; {names} {verb} served", "model")


def find_card(models: ModelList, name: str) -> ModelCard:
    """Returns the model card for a name. Raises UnknownModelError."""
    check_model(name, [card.id for card in models.data])
    return next(card for card in models.data if card.id == name)


def fingerprint(config: SlipstreamConfig, checkpoint: str) -> str:
    """Returns a fingerprint of all server state that affects answers; drafts do not affect them."""
    decisive = {
        "version": version(),
        "weights": checkpoint or config.model.target,
        "model": config.model.model_dump(include={"dtype", "max_context", "numerics"}),
        "target": config.target.model_dump(include={"engine", "vllm", "adapters", "tensor_parallel"}),
        "server": config.server.model_dump(include=SERVER_FIELDS),
    }
    text = json.dumps(decisive, sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}_{config.model.numerics}"
