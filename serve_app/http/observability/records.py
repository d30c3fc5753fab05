"""What is known of a request while it runs: for counters and traces, which look at it when it is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.http.wire.replies import FinishReason
from serve_app.http.wire.schemas import GenerationRequest

CLIENT_LEFT = 499
"""The status under which requests are counted whose client did not wait for the answer."""


class ChoiceRecord(Protocol):
    """One choice of an answer, as far as it has come."""

    tokens: int
    accepted: int
    rejected: int
    finish: FinishReason | None
    first_token_s: float | None  # after its session's start


@dataclass
class RequestRecord:
    """What a running request is and how it ends, so far."""

    status: int = CLIENT_LEFT
    traceparent: str = ""  # of what is done for it; empty: it is not traced
    request: GenerationRequest | None = None  # once it is understood
    name: str = ""  # which the answer tells in a header
    response_id: str = ""  # empty until the request is taken
    sessions: Sequence[str] = ()
    prompt_tokens: int = 0
    choices: Sequence[ChoiceRecord] = ()
