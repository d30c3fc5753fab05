"""Facts about the deployment that every drafting method receives."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from protos.frozen import value
from protos.states import StatesFormat

if TYPE_CHECKING:
    from actors.sampling.logits.processor import Maker


@value
class DraftSetup:
    """Deployment facts, in addition to the method's own section of the configuration."""

    dtype: str  # of both models
    max_context: int  # tokens of the longest session
    max_draft_tokens: int  # of the longest block
    target_tokens: Mapping[int, str]  # by id; no other token is ever proposed
    target: str  # Hugging Face id or folder of the target; some methods use its weights
    states: StatesFormat | None = None  # of the target's hidden states, if the method reads them
    makers: "tuple[Maker, ...]" = ()  # of logits processors, in addition to those built from an Open alone
