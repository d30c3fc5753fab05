"""The store of examples: one SQLite file that routers write, the trainer reads and `slipstream learn forget` empties.

`ExampleStore` is the file. It limits total tokens and age, stores near-duplicates once, and overwrites deleted data.
`ExampleWriter` is used by routers: `offer` never waits, and drops examples when the queue is full.
"""

import logging
import os
import queue
import sqlite3
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.config import LearningOptions
from cluster.errors import ConfigError
from cluster.learning import Example, Source, sketch
from protos.frozen import value

log = logging.getLogger(__name__)

FILE = "examples.sqlite"
DAY_S = 86_400.0
WAIT_S = 10.0  # longest wait for another process's lock
SCHEMA = """
CREATE TABLE IF NOT EXISTS examples (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    created REAL NOT NULL,
    target TEXT NOT NULL,
    key TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    prompt BLOB NOT NULL,
    answer BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_key ON examples (key);
CREATE TABLE IF NOT EXISTS bands (
    hash INTEGER PRIMARY KEY,
    example INTEGER NOT NULL REFERENCES examples (id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS by_example ON bands (example);
"""


@value
class StoreSize:
    """Counts of stored examples."""

    examples: int = 0
    tokens: int = 0
    newest: int = 0  # id of the newest example; ids only grow


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(data) // 4}i", data)


class ExampleStore:
    """Examples in `folder`, at most `max_tokens` tokens and `max_age_s` seconds old. Not thread-safe: use one per
    thread.
    """

    def __init__(self, folder: Path, max_tokens: int, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        """Opens or creates the file, readable by its owner only. Raises ConfigError if the folder cannot be used."""
        self._path = folder / FILE
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._clock = clock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.execute("PRAGMA secure_delete = ON")
            self._connection.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"draft.learning.folder: cannot open {self._path}: {error}") from error

    @classmethod
    def of(cls, options: LearningOptions) -> "ExampleStore":
        """Opens the store that the configuration names."""
        return cls(Path(options.folder).expanduser(), options.max_tokens, options.max_age_days * DAY_S)

    def close(self) -> None:
        self._connection.close()

    def add(self, examples: Sequence[Example], target: str) -> Counter[str]:
        """Adds examples of the target with this fingerprint in one transaction; drops the oldest beyond the limits.

        Returns counts by outcome, `kept` and `duplicate`. Raises sqlite3.Error, for instance if the disk is full; then
        nothing was added.
        """
        outcomes: Counter[str] = Counter()
        with self._transaction() as run:
            for example in examples:
                outcomes["kept" if self._insert(run, example, target) else "duplicate"] += 1
            self._drop_excess(run)
        return outcomes

    def _insert(self, run: sqlite3.Cursor, example: Example, target: str) -> bool:
        bands = sketch(example.answer)
        marks = ",".join("?" * len(bands))
        if run.execute(f"SELECT 1 FROM bands WHERE hash IN ({marks}) LIMIT 1", bands).fetchone():
            return False
        run.execute(
            "INSERT INTO examples (created, target, key, prompt_version, tokens, prompt, answer)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self._clock(),
                target,
                example.source.key,
                example.source.prompt_version,
                len(example.prompt) + len(example.answer),
                _packed(example.prompt),
                _packed(example.answer),
            ),
        )
        run.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", [(band, run.lastrowid) for band in bands])
        return True

    def _drop_excess(self, run: sqlite3.Cursor) -> None:
        run.execute("DELETE FROM examples WHERE created < ?", (self._clock() - self._max_age_s,))
        run.execute(
            "DELETE FROM examples WHERE id IN (SELECT id FROM"
            " (SELECT id, SUM(tokens) OVER (ORDER BY id DESC) AS newer FROM examples) WHERE newer > ?)",
            (self._max_tokens,),
        )

    def read(self, target: str, after: int = 0) -> list[Example]:
        """Returns a target's examples with ids above `after`, oldest first, except those beyond the maximum age."""
        rows = self._connection.execute(
            "SELECT prompt, answer, key, prompt_version FROM examples"
            " WHERE target = ? AND id > ? AND created >= ? ORDER BY id",
            (target, after, self._clock() - self._max_age_s),
        )
        return [
            Example(_unpacked(prompt), _unpacked(answer), Source(key, version)) for prompt, answer, key, version in rows
        ]

    def size(self, target: str | None = None, after: int = 0) -> StoreSize:
        """Returns counts for one target, or for all, of examples with ids above `after`."""
        row = self._connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(MAX(id), ?) FROM examples"
            " WHERE id > ? AND (? IS NULL OR target = ?)",
            (after, after, target, target),
        ).fetchone()
        return StoreSize(*row)

    def forget(self, key: str | None = None) -> int:
        """Deletes the examples of an API key, or all; returns their number. Deleted text is overwritten on disk."""
        with self._transaction() as run:
            if key is None:
                run.execute("DELETE FROM examples")
            else:
                run.execute("DELETE FROM examples WHERE key = ?", (key,))
            deleted = run.rowcount
        self._connection.execute("VACUUM")
        return deleted

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()


QUEUED = 256  # most examples waiting to be written; further ones are dropped
BATCH_S = 1.0  # examples that arrive within this time are written together
LOG_S = 60.0  # least time between two log lines about failures


class ExampleWriter:
    """Writes examples on its own thread. Failures are counted and logged, and never reach the caller."""

    def __init__(self, open_store: Callable[[], ExampleStore], target: str) -> None:
        """Starts the thread. It calls `open_store`, and again after a failure."""
        self.counts: Counter[str] = Counter()  # number of examples by outcome: kept, duplicate, dropped, failed
        self._open_store = open_store
        self._target = target
        self._queue: queue.Queue[Example | None] = queue.Queue(QUEUED)
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._write, name="examples", daemon=True)
        self._thread.start()

    def offer(self, example: Example) -> None:
        """Queues an example, or drops it if the queue is full."""
        try:
            self._queue.put_nowait(example)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Writes all queued examples and ends the thread; waits up to WAIT_S."""
        self._queue.put(None)
        self._thread.join(WAIT_S)

    def _write(self) -> None:
        store: ExampleStore | None = None
        is_last = False
        while not is_last:
            batch, is_last = self._take()
            if not batch:
                continue
            try:
                store = store or self._open_store()
                self.counts += store.add(batch, self._target)
            except (ConfigError, sqlite3.Error) as error:
                self.counts["failed"] += len(batch)
                store = None
                if time.monotonic() - self._logged > LOG_S:
                    self._logged = time.monotonic()
                    log.warning("cannot keep examples to learn from: %s; %d dropped", error, self.counts["failed"])
        if store is not None:
            store.close()

    def _take(self) -> tuple[list[Example], bool]:
        """Waits for an example and collects those of the next BATCH_S; also returns True with the last batch."""
        batch: list[Example] = []
        until: float | None = None
        while len(batch) < QUEUED:
            try:
                example = self._queue.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if example is None:
                return batch, True
            batch.append(example)
            until = until or time.monotonic() + BATCH_S
        return batch, False
