"""The store of examples: one SQLite file that routers write, the trainer reads and `slipstream learn forget` empties.

`ExampleStore` is the file. It limits total tokens and age, stores near-duplicates of one target once, and overwrites
deleted data. If the draft is a head, drafters add the hidden states that the head read in each session. States are
deleted with their example; states without an example, such as those of a near-duplicate, are deleted after
`ORPHANED_S`.

`ExampleWriter` is used by routers, `StateRecorder` by drafters. Neither ever waits; both drop data when the queue is
full.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from cluster.config import LearningOptions
from cluster.errors import ConfigError
from cluster.learning import HELD_OUT, Example, Source, is_held_out, missing_examples, sketch
from protos.frozen import value
from protos.messages import Open

log = logging.getLogger(__name__)

Item = TypeVar("Item")

FILE = "examples.sqlite"
DAY_S = 86_400.0
WAIT_S = 10.0  # longest wait for another process's lock
ORPHANED_S = 60.0  # seconds that states wait for their example
SCHEMA = """
CREATE TABLE IF NOT EXISTS examples (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    created REAL NOT NULL,
    target TEXT NOT NULL,
    key TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    prompt BLOB NOT NULL,
    answer BLOB NOT NULL,
    session TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_key ON examples (key);
CREATE INDEX IF NOT EXISTS by_session ON examples (session);
CREATE TABLE IF NOT EXISTS bands (
    hash INTEGER PRIMARY KEY,
    example INTEGER NOT NULL REFERENCES examples (id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS by_example ON bands (example);
CREATE TABLE IF NOT EXISTS states (
    session TEXT PRIMARY KEY,
    created REAL NOT NULL,
    kind TEXT NOT NULL,
    first INTEGER NOT NULL,
    rows BLOB NOT NULL
);
CREATE TRIGGER IF NOT EXISTS states_leave AFTER DELETE ON examples BEGIN
    DELETE FROM states WHERE session = OLD.session;
END;
"""


HAS_STATES = "(? = '' OR session IN (SELECT session FROM states WHERE kind = ?))"
HAS_OUTDATED_STATES = (  # of an earlier head, so that the example cannot be used
    "SELECT 1 FROM states WHERE session = (SELECT session FROM examples WHERE id = ?)"
    " AND kind != (SELECT kind FROM states ORDER BY created DESC LIMIT 1)"
)


@value
class StoreSize:
    """Counts of stored examples."""

    examples: int = 0
    tokens: int = 0
    newest: int = 0  # id of the newest example; ids only grow


@value
class KeptStates:
    """The target's states of one session at positions `first`, `first` + 1, ..., encoded as a drafter received them."""

    session: str
    kind: str  # format of the rows, and the head and layers for which they were computed
    first: int
    rows: bytes


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(data) // 4}i", data)


class ExampleStore:
    """Examples in `folder`, at most `max_tokens` tokens and `max_age_s` seconds old, with at most `max_state_bytes`
    bytes of states. Not thread-safe: use one per thread.
    """

    def __init__(
        self,
        folder: Path,
        max_tokens: int,
        max_age_s: float,
        max_state_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens or creates the file, readable by its owner only. Raises ConfigError if the folder cannot be used."""
        self._path = folder / FILE
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._max_state_bytes = max_state_bytes
        self._clock = clock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.execute("PRAGMA secure_delete = ON")
            self._add_sessions()
            self._connection.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"draft.learning.folder: cannot open {self._path}: {error}") from error

    def _add_sessions(self) -> None:
        """Adds the column of sessions to a file that an earlier version wrote."""
        if self._lacks_sessions():
            with self._transaction() as run:
                if self._lacks_sessions():  # no other process was faster
                    run.execute("ALTER TABLE examples ADD COLUMN session TEXT NOT NULL DEFAULT ''")

    def _lacks_sessions(self) -> bool:
        columns = {name for _, name, *_ in self._connection.execute("PRAGMA table_info(examples)")}
        return bool(columns) and "session" not in columns

    @classmethod
    def of(cls, options: LearningOptions) -> "ExampleStore":
        """Opens the store that the configuration names."""
        folder = Path(options.folder).expanduser()
        return cls(folder, options.max_tokens, options.max_age_days * DAY_S, options.max_state_bytes)

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
        """Adds an example, in place of near-duplicates with states of an earlier head; returns False for a
        near-duplicate of others.
        """
        bands = sketch(example.answer, target)
        marks = ",".join("?" * len(bands))
        alike = run.execute(f"SELECT DISTINCT example FROM bands WHERE hash IN ({marks})", bands).fetchall()
        if not all(run.execute(HAS_OUTDATED_STATES, known).fetchone() for known in alike):
            return False
        run.executemany("DELETE FROM examples WHERE id = ?", alike)
        run.execute(
            "INSERT INTO examples (created, target, key, prompt_version, tokens, prompt, answer, session)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._clock(),
                target,
                example.source.key,
                example.source.prompt_version,
                len(example.prompt) + len(example.answer),
                _packed(example.prompt),
                _packed(example.answer),
                example.session,
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
        run.execute(
            "DELETE FROM states WHERE created < ? AND session NOT IN (SELECT session FROM examples)",
            (self._clock() - ORPHANED_S,),
        )
        run.execute(
            "DELETE FROM states WHERE session IN (SELECT session FROM"
            " (SELECT session, SUM(LENGTH(rows)) OVER (ORDER BY created DESC, session) AS newer FROM states)"
            " WHERE newer > ?)",
            (self._max_state_bytes,),
        )

    def sweep(self) -> None:
        """Deletes examples and states that exceed the limits."""
        with self._transaction() as run:
            self._drop_excess(run)

    def read(self, target: str, after: int = 0, kind: str = "") -> list[Example]:
        """Returns a target's examples with ids above `after`, oldest first, except those beyond the maximum age.

        With `kind`, only those with states of this kind.
        """
        rows = self._connection.execute(
            "SELECT prompt, answer, key, prompt_version, session FROM examples"
            f" WHERE target = ? AND id > ? AND created >= ? AND {HAS_STATES} ORDER BY id",
            (target, after, self._clock() - self._max_age_s, kind, kind),
        )
        return [
            Example(_unpacked(prompt), _unpacked(answer), Source(key, version), session)
            for prompt, answer, key, version, session in rows
        ]

    def add_states(self, states: Sequence[KeptStates]) -> Counter[str]:
        """Adds states in one transaction, the longer ones if a session has some; drops the oldest beyond the limits.

        Returns the number of sessions as `kept`. Raises sqlite3.Error like `add`.
        """
        with self._transaction() as run:
            run.executemany(
                "INSERT INTO states VALUES (?, ?, ?, ?, ?) ON CONFLICT (session) DO UPDATE SET"
                " created = excluded.created, kind = excluded.kind, first = excluded.first, rows = excluded.rows"
                " WHERE LENGTH(excluded.rows) > LENGTH(rows)",
                [(each.session, self._clock(), each.kind, each.first, each.rows) for each in states],
            )
            self._drop_excess(run)
        return Counter(kept=len(states))

    def states_of(self, session: str) -> KeptStates | None:
        """Returns a session's states; None if it has none."""
        found = self._connection.execute("SELECT * FROM states WHERE session = ?", (session,)).fetchone()
        return None if found is None else KeptStates(found[0], found[2], found[3], found[4])

    def size(self, target: str | None = None, after: int = 0, kind: str = "") -> StoreSize:
        """Returns counts for one target, or for all, of the examples that `read` returns."""
        row = self._connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(MAX(id), ?) FROM examples"
            f" WHERE id > ? AND (? IS NULL OR target = ?) AND {HAS_STATES}",
            (after, after, target, target, kind, kind),
        ).fetchone()
        return StoreSize(*row)

    def missing(self, options: LearningOptions, target: str, after: int = 0, kind: str = "") -> int:
        """Returns about how many more examples a training needs if those up to id `after` were used; 0: it may start.

        `kind` is that of `read`.
        """
        new = self.size(target, after, kind).examples
        if new < options.min_examples:  # not worth reading the examples yet
            held_out = self.size(target, kind=kind).examples / HELD_OUT
        else:
            held_out = sum(map(is_held_out, self.read(target, kind=kind)))
        return missing_examples(new, held_out, options.min_examples, options.min_sessions)

    def newest(self) -> tuple[str, str]:
        """Returns the target of the newest example and the kind of the newest states; "none" if there are none."""
        target, kind = self._connection.execute(
            "SELECT (SELECT target FROM examples ORDER BY id DESC LIMIT 1),"
            " (SELECT kind FROM states ORDER BY created DESC LIMIT 1)"
        ).fetchone()
        return target or "none", kind or "none"

    def forgets(self) -> int:
        """Returns how often examples were forgotten; a training that began before must not be used."""
        (count,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(count)

    def forget(self, key: str | None = None) -> int:
        """Deletes the examples of an API key, or all, with their states; returns the number of examples.

        Deleted data is overwritten on disk. States without an example, which may be the key's, are deleted too. Raises
        ConfigError if the file is busy or the disk is full.
        """
        try:
            with self._transaction() as run:
                run.execute(f"PRAGMA user_version = {self.forgets() + 1}")
                run.execute("DELETE FROM examples WHERE ? IS NULL OR key = ?", (key, key))
                deleted = run.rowcount
                run.execute("DELETE FROM states WHERE session NOT IN (SELECT session FROM examples)")
            self._connection.execute("VACUUM")
        except sqlite3.Error as error:
            raise ConfigError(f"cannot delete examples in {self._path}: {error}; try again") from error
        return deleted

    def largest_key(self) -> tuple[str, float]:
        """Returns the API key with the most tokens and its share of all; without examples, an empty name and 0."""
        found: tuple[str, float] | None = self._connection.execute(
            "SELECT key, SUM(tokens) * 1.0 / (SELECT SUM(tokens) FROM examples) FROM examples"
            " GROUP BY key ORDER BY 2 DESC LIMIT 1"
        ).fetchone()
        return ("", 0.0) if found is None else found

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


class StoreWriter(Generic[Item]):
    """Writes items to a store on its own thread. Failures are counted and logged, and never reach the caller."""

    def __init__(
        self,
        open_store: Callable[[], ExampleStore],
        write: Callable[[ExampleStore, Sequence[Item]], Counter[str]],  # returns counts by outcome
        queued: int = QUEUED,  # most items waiting to be written; further ones are dropped
    ) -> None:
        """Starts the thread. It calls `open_store`, and again after a failure."""
        self.counts: Counter[str] = Counter()  # number of items by outcome: dropped, failed, or what `write` returns
        self._open_store = open_store
        self._write_to = write
        self._queue: queue.Queue[Item | None] = queue.Queue(queued)
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._write, name="examples", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> None:
        """Queues an item, or drops it if the queue is full."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Writes all queued items and ends the thread; waits up to WAIT_S."""
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
                self.counts.update(self._write_to(store, batch))  # += would iterate over `counts` while `offer` adds
            except (ConfigError, sqlite3.Error) as error:
                self.counts["failed"] += len(batch)
                store = None
                if time.monotonic() - self._logged > LOG_S:
                    self._logged = time.monotonic()
                    log.warning("cannot keep sessions to learn from: %s; %d dropped", error, self.counts["failed"])
        if store is not None:
            store.close()

    def _take(self) -> tuple[list[Item], bool]:
        """Waits for an item and collects those of the next BATCH_S; also returns True with the last batch."""
        batch: list[Item] = []
        until: float | None = None
        while len(batch) < self._queue.maxsize:
            try:
                item = self._queue.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
            until = until or time.monotonic() + BATCH_S
        return batch, False


class ExampleWriter(StoreWriter[Example]):
    """Writes examples of the target with this fingerprint."""

    def __init__(self, open_store: Callable[[], ExampleStore], target: str) -> None:
        super().__init__(open_store, partial(ExampleStore.add, target=target))


PROMPT_STATES = 512  # maximum states kept before an answer; a trainer reads no more
SESSION_BYTES = 8 << 20  # maximum bytes of states per session; at least half are left for the answer
OPEN_BYTES = 256 << 20  # most bytes of states of open sessions
QUEUED_STATES = 64  # most sessions whose states wait to be written


@dataclass(slots=True)
class _Record:
    """States of an open session so far."""

    begins: int  # position before which none are kept
    first: int = 0
    rows: list[bytes] = field(default_factory=list)
    bytes: int = 0


class StateRecorder:
    """Keeps the hidden states that a drafter's head reads, and writes a session's when it ends.

    Ignores sessions opened without `may_learn`. A drafting method calls it on the drafting thread.
    """

    def __init__(self, open_store: Callable[[], ExampleStore], kind: str, row_bytes: int) -> None:
        self._kind = kind
        self._row_bytes = row_bytes
        self._records: dict[str, _Record] = {}
        self._bytes = 0  # total of `_records`
        self._writer: StoreWriter[KeptStates] = StoreWriter(open_store, ExampleStore.add_states, QUEUED_STATES)

    @property
    def counts(self) -> Counter[str]:
        """Number of sessions by outcome: kept, dropped, failed."""
        return self._writer.counts

    def open(self, request: Open) -> None:
        """Starts a session; an earlier one of that name has been closed."""
        if request.may_learn:
            before = min(PROMPT_STATES, SESSION_BYTES // (2 * self._row_bytes))
            self._records[request.session] = _Record(max(0, request.prompt_len - before))

    def states(self, session: str, first: int, rows: bytes) -> None:
        """Adds states at positions `first`, `first` + 1, ..., which follow those before."""
        record = self._records.get(session)
        if record is None:
            return
        skipped = max(0, record.begins - first)
        room = (SESSION_BYTES - record.bytes) // self._row_bytes  # at 0, drops all later states, which leaves no gap
        kept = rows[skipped * self._row_bytes : (skipped + room) * self._row_bytes]
        if not kept:
            return
        if self._bytes + len(kept) > OPEN_BYTES:
            self._forget(session)
            self._writer.counts["dropped"] += 1
            return
        if not record.rows:
            record.first = first + skipped
        record.rows.append(kept)
        record.bytes += len(kept)
        self._bytes += len(kept)

    def close(self, sessions: Sequence[str]) -> None:
        """Queues the states of sessions that have ended; ignores unknown ones."""
        for session in sessions:
            record = self._forget(session)
            if record is not None and record.rows:
                self._writer.offer(KeptStates(session, self._kind, record.first, b"".join(record.rows)))

    def end(self) -> None:
        """Writes all queued states; waits up to WAIT_S. Those of open sessions are dropped."""
        self._writer.close()

    def _forget(self, session: str) -> _Record | None:
        record = self._records.pop(session, None)
        self._bytes -= 0 if record is None else record.bytes
        return record
