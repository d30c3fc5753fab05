"""Reports audit differences: an ERROR log line, and a JSON line in a file of bounded size."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cluster.audit import Difference
from cluster.errors import ConfigError

log = logging.getLogger(__name__)


class AuditAlarm:
    """Records every audit difference. Routers on one machine may share a file, since each line is a single write."""

    def __init__(self, records: str | None, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if `records` cannot be written."""
        self._path = None if records is None else Path(records).expanduser()
        self._max_bytes = max_bytes
        self._clock = clock
        if self._path is not None:
            self._check(self._path)

    def __call__(self, difference: Difference) -> None:
        margin = "an unknown margin" if difference.margin is None else f"a margin of {difference.margin:.4g}"
        log.error(
            "audit: text differs from non-speculative decoding: session %s, token %d of the answer, %s; served by %s,"
            " audited by %s",
            difference.session,
            difference.position,
            margin,
            ", ".join(difference.served_by),
            difference.audited_by,
        )
        if self._path is not None:
            self._record(self._path, difference)

    def _check(self, path: Path) -> None:
        try:
            path.open("ab").close()
        except OSError as error:
            what = f"server.audit.records is {path}, which cannot be written: {error.strerror}"
            raise ConfigError(f"{what}; expected a file in a folder that exists") from error

    def _record(self, path: Path, difference: Difference) -> None:
        """Appends a record; logs write errors without raising them."""
        record = {"time": self._clock(), **asdict(difference), "acceptance": difference.acceptance.name.lower()}
        line = json.dumps(record).encode() + b"\n"
        try:
            with path.open("ab", buffering=0) as file:
                if file.tell() + len(line) <= self._max_bytes:
                    file.write(line)
                else:
                    log.warning("%s is full; the difference was not written to it", path)
        except OSError as error:
            log.error("the difference could not be written to %s: %s", path, error.strerror)
