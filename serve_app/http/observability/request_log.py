"""A line in the log for each request that has ended: numbers, ids, the version of its prompt, and nothing it said."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from serve_app.http.observability.records import RequestRecord

log = logging.getLogger(__name__)


@contextmanager
def logged(endpoint: str, record: RequestRecord, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Lasts as long as the request. `sessions` are what other processes' lines call its choices."""
    began = clock()
    try:
        yield
    finally:
        if log.isEnabledFor(logging.INFO):
            choices = record.choices
            told: dict[str, object] = {
                "request": record.response_id or record.name,
                "endpoint": endpoint,
                "status": record.status,
                "seconds": round(clock() - began, 6),
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": sum(choice.tokens for choice in choices),
                "accepted_tokens": sum(choice.accepted for choice in choices),
                "rejected_tokens": sum(choice.rejected for choice in choices),
                "sessions": " ".join(record.sessions),
            }
            if record.request is not None and record.request.prompt_version is not None:
                told["prompt_version"] = record.request.prompt_version
            log.info("a request has ended: %s", _in_words(told), extra=told)


def _in_words(told: Mapping[str, object]) -> str:
    """For lines of text, which have nothing of a record's extras: a word for each fact."""
    return " ".join(f"{name}={str(value).replace(' ', ',')}" for name, value in told.items())
