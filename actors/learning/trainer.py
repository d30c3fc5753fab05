"""The trainer: waits for new examples, trains a candidate, judges it, and promotes it or records why not.

`Trainer.look` does one round and blocks while it trains; a thread calls it repeatedly. Only one trainer works on a
folder at a time; others wait for its lock. Failures are counted, logged and retried later, and promote nothing. A
trainer that is killed leaves a mark, by which the next one counts and logs it. If examples are forgotten during a
training, it is dropped and starts over without them.
"""

import fcntl
import logging
import os
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.learning.draft_trainee import DraftTrainee
from actors.learning.evaluation import CPU, do_nothing
from actors.learning.examples import ExampleStore, StoreSize
from actors.learning.head_trainee import HeadLearning, StatesFile
from actors.learning.trainable import fingerprint_of
from actors.learning.trainee import Load, TrainingOptions
from actors.learning.training import TrainingProgress, train
from actors.learning.versions import VersionFolder
from cluster.config import LearningOptions
from cluster.errors import SlipstreamError
from cluster.learning import (
    Comparison,
    Decision,
    Example,
    Figures,
    Manifest,
    State,
    compare,
    decide,
    held_out_sessions,
    is_held_out,
)
from protos.frozen import value

log = logging.getLogger(__name__)

EXPECTED_ERRORS = (SlipstreamError, OSError, sqlite3.Error)  # logged without a traceback
RETRY_S = 600.0  # pause after a failure; doubles with each further one in a row
LONGEST_RETRY_S = 24 * 3600.0
LOCK = "trainer.lock"
UNFINISHED = "unfinished"  # file that exists during a training, and after it if the trainer was killed
OLDER_SHARE = 1.0  # older examples trained on per new one
EVALUATED = 400  # most examples per kind, recent or general, in an evaluation


@value
class Draft:
    """The configured draft, and the target for which it drafts."""

    folder: Path
    method: str
    target: str  # fingerprint of the target
    draft_tokens: int
    device: torch.device = CPU  # used for training
    head: HeadLearning | None = None  # None: the draft is a model


@value
class Trained:
    """Figures of a finished training, and the candidate's scores on examples that neither draft was trained on."""

    examples: int
    tokens: int  # total tokens of the answers
    seconds: float
    steps: int
    best_step: int  # step at which the candidate's weights were taken
    recent: Comparison
    general: Comparison | None  # None if there are no general examples

    def manifest(self, **facts: Any) -> Manifest:
        """Returns the candidate's manifest; the folder of versions assigns its number."""
        return Manifest(
            version=1,
            examples=self.examples,
            tokens=self.tokens,
            seconds=self.seconds,
            recent=self.recent,
            general=self.general,
            **facts,
        )


def train_candidate(
    start: Path,
    out: Path,
    recent: Sequence[Example],
    general: Sequence[Example],
    options: TrainingOptions,
    *,
    older: Sequence[Example] = (),
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = do_nothing,
    state: Path | None = None,
    device: torch.device = CPU,
    load: Load = DraftTrainee,
) -> Trained | None:
    """Trains the draft in folder `start` into folder `out`, and compares both; None if it was stopped.

    Held-out examples are never used for training. Half of the recent ones decide when training stops, the other half
    judge the result. Raises what `training.train` raises.
    """
    held_out = [example for example in recent if is_held_out(example)][-EVALUATED:]
    stopping, judging = held_out[::2], held_out[1::2]
    learned = [example for example in (*older, *recent) if not is_held_out(example)]
    rehearsed = [example for example in general if not is_held_out(example)]
    unseen = [example for example in general if is_held_out(example)][:EVALUATED]
    result = train(
        start,
        out,
        learned,
        stopping,
        rehearsed,
        options,
        progress=progress,
        should_stop=should_stop,
        pause=pause,
        state=state,
        device=device,
        load=load,
    )
    if not result.is_complete:
        return None

    def compared(examples: Sequence[Example]) -> Comparison:
        before, after = (load(draft, device).score(examples, options, pause) for draft in (start, out))
        return compare(before, after)

    return Trained(
        examples=len(learned),
        tokens=sum(len(example.answer) for example in learned),
        seconds=result.seconds,
        steps=result.steps,
        best_step=result.best_step,
        recent=compared(judging),
        general=compared(unseen) if unseen else None,
    )


def usable_version(versions: VersionFolder, target: str, draft: str) -> int:
    """Returns the current version, or 0 if it does not fit the fingerprints of the target and the configured draft."""
    current = versions.current()
    return current if current and versions.manifest_of(current).fits(target, draft) else 0


@value
class TrainerStatus:
    """State of the trainer, for display."""

    phase: str  # waiting, training, evaluating or locked out
    examples: int  # stored examples of this target
    new_examples: int  # examples since the last training
    version: int  # number of the current version
    progress: TrainingProgress | None
    counts: dict[str, int]  # trainings by outcome: promoted, rejected, failed, interrupted, locked_out, killed
    training_s: float
    before: Figures | None = None  # scores before the latest training, on held-out recent examples
    after: Figures | None = None


@value
class _Selection:
    """Examples of one training."""

    recent: Sequence[Example]  # held-out ones included
    older: Sequence[Example]
    newest: int  # highest id of the new ones
    forgets: int  # `ExampleStore.forgets()` when they were read


class Trainer:
    """Trains versions of one draft from the examples in a folder."""

    def __init__(
        self,
        options: LearningOptions,
        draft: Draft,
        replay: Sequence[Example],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        pause: Callable[[], None] = do_nothing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._draft = draft
        self._folder = Path(options.folder).expanduser()
        self._versions = VersionFolder(self._folder)
        self._general = replay
        self._should_stop = should_stop
        self._pause = pause
        self._clock = clock
        self._phase = "waiting"
        self._is_waiting = False  # for examples; logged once
        self._progress: TrainingProgress | None = None
        self._counts: Counter[str] = Counter()
        self._training_s = 0.0
        self._latest: Comparison | None = None
        self._shown = (StoreSize(), 0, 0)  # examples, new ones and the current version, as last read
        self._failures = 0  # failed rounds in a row
        self._not_before = 0.0  # after a failure, no training before this time

    def status(self) -> TrainerStatus:
        """Returns the state; may be called from another thread while `look` runs.

        An unreadable folder leaves the figures as they were; `look` reports it.
        """
        with suppress(*EXPECTED_ERRORS), closing(ExampleStore.of(self._options)) as store:
            seen = self._versions.trained_to(self._draft.target)
            new = store.size(self._draft.target, seen, self._kind)
            self._shown = store.size(self._draft.target, kind=self._kind), new.examples, self._versions.current()
        size, new_examples, version = self._shown
        return TrainerStatus(
            phase=self._phase,
            examples=size.examples,
            new_examples=new_examples,
            version=version,
            progress=self._progress,
            counts=dict(self._counts),
            training_s=self._training_s,
            before=None if self._latest is None else self._latest.before,
            after=None if self._latest is None else self._latest.after,
        )

    def look(self) -> Manifest | None:
        """Trains if there are enough new examples; returns the new version's manifest."""
        if self._clock() < self._not_before:
            return None
        try:
            with closing(ExampleStore.of(self._options)) as store, trainer_lock(self._folder) as is_ours:
                found = None
                if is_ours:
                    self._phase = "waiting"
                    self._report_killed()
                    found = self._train_if_due(store)
                else:
                    self._wait_for_other()
        except Exception as error:  # noqa: BLE001  # whatever fails, the next round may succeed
            self._fail(error)
            return None
        finally:
            self._progress = None
            if self._draft.device.type == "cuda":
                torch.cuda.empty_cache()  # drafters on the same GPU may need the memory
        self._failures = 0
        return found

    def _wait_for_other(self) -> None:
        if self._phase != "locked out":
            self._counts["locked_out"] += 1
            log.warning("another trainer works in %s, so this one waits; stop one of them", self._folder)
        self._phase = "locked out"

    @property
    def _mark(self) -> Path:
        return self._folder / "training" / UNFINISHED

    def _report_killed(self) -> None:
        """Counts and logs a training that another trainer left unfinished."""
        if self._mark.exists():
            self._mark.unlink()
            self._counts["killed"] += 1
            log.warning(
                "a trainer was killed during a training in %s, which continues from its saved state; if this repeats,"
                " check the memory of its node",
                self._folder,
            )

    @contextmanager
    def _marked(self) -> Iterator[None]:
        self._mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mark.touch(mode=0o600)
        try:
            yield
        finally:
            self._mark.unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        pause_s = min(LONGEST_RETRY_S, RETRY_S * 2**self._failures)
        self._failures += 1
        self._counts["failed"] += 1
        self._phase = "waiting"
        self._not_before = self._clock() + pause_s
        log.error(
            "training failed; the draft is unchanged; retrying in %g s: %s",
            pause_s,
            str(error) or type(error).__name__,
            exc_info=not isinstance(error, EXPECTED_ERRORS),
        )

    def _train_if_due(self, store: ExampleStore) -> Manifest | None:
        seen = self._versions.trained_to(self._draft.target)
        store.sweep()
        if missing := store.missing(self._options, self._draft.target, seen, self._kind):
            if not self._is_waiting:
                log.info("the next training needs about %d more examples", missing)
            self._is_waiting = True
            return None
        self._is_waiting = False
        selection = self._select(store, seen)
        self._remove_candidate()  # a killed trainer may have left that of another draft
        try:
            with self._marked(), self._loader(store, selection) as load:
                return self._try(store, selection, load)
        finally:
            self._remove_candidate()

    def _remove_candidate(self) -> None:
        shutil.rmtree(self._candidate, ignore_errors=True)

    @property
    def _candidate(self) -> Path:
        return self._folder / "training" / "candidate"

    def _select(self, store: ExampleStore, seen: int) -> _Selection:
        forgets = store.forgets()  # read first, so that a later `forget` is detected
        newest = store.size(self._draft.target, seen, self._kind).newest
        new = store.read(self._draft.target, seen, self._kind)
        known = set(new)
        old = [example for example in store.read(self._draft.target, kind=self._kind) if example not in known]
        older = random.Random(newest).sample(old, min(len(old), round(OLDER_SHARE * len(new))))
        lacking = held_out_sessions(self._options.min_sessions) - sum(map(is_held_out, new))
        if lacking > 0:  # fill up with the newest earlier held-out examples
            new = [*[example for example in old if is_held_out(example)][-lacking:], *new]
        return _Selection(new, older, newest, forgets)

    @property
    def _kind(self) -> str:
        """Kind of states without which an example cannot be used; empty: none are needed."""
        return "" if self._draft.head is None else self._draft.head.kind

    @contextmanager
    def _loader(self, store: ExampleStore, selection: _Selection) -> Iterator[Load]:
        """Yields the loader of drafts for these examples. A head's loader also reads their hidden states."""
        head = self._draft.head
        if head is None:
            yield DraftTrainee
            return
        with StatesFile(self._folder, head.layout) as states:
            for example in (*selection.recent, *selection.older):
                found = store.states_of(example.session)
                if found is not None and found.kind == head.kind:
                    states.add(found.session, found.first, found.rows)
            yield head.trainee(states)

    def _try(self, store: ExampleStore, selection: _Selection, load: Load) -> Manifest | None:
        """Trains and judges a candidate, and adds it as a version, unless examples were forgotten meanwhile."""

        def is_forgotten() -> bool:
            return store.forgets() != selection.forgets

        configured = fingerprint_of(self._draft.folder)
        parent = usable_version(self._versions, self._draft.target, configured)
        start = self._versions.folder_of(parent) if parent else self._draft.folder
        self._phase = "training"
        trained = train_candidate(
            start,
            self._candidate,
            selection.recent,
            self._general,
            self._training_options(selection.forgets),
            older=selection.older,
            progress=self._report,
            should_stop=lambda: self._should_stop() or is_forgotten(),
            pause=self._pause,
            state=self._folder / "training" / "state",
            device=self._draft.device,
            load=load,
        )
        if trained is None:
            self._counts["interrupted"] += 1
            return None
        self._latest = trained.recent
        self._training_s += trained.seconds
        decision = decide(trained.recent, trained.general, self._options.max_general_loss, self._options.min_sessions)
        manifest = trained.manifest(
            parent=parent,
            created=self._clock(),
            state=State.CANDIDATE if decision.is_better else State.REJECTED,
            reason=decision.reason,
            method=self._draft.method,
            target=self._draft.target,
            draft=configured,
            newest=selection.newest,
        )
        if is_forgotten():
            self._counts["interrupted"] += 1
            return None
        return self._record(manifest, decision)

    def _record(self, manifest: Manifest, decision: Decision) -> Manifest:
        manifest = self._versions.add(manifest, partial(shutil.copytree, self._candidate, dirs_exist_ok=True))
        if decision.is_better:
            self._versions.promote(manifest.version)
        self._versions.remove_old(self._options.keep_versions)
        self._counts["promoted" if decision.is_better else "rejected"] += 1
        outcome = "promoted" if decision.is_better else "not promoted"
        log.info("draft version %d is %s: %s", manifest.version, outcome, decision.reason)
        return manifest

    def _training_options(self, forgets: int) -> TrainingOptions:
        return TrainingOptions(
            seed=forgets,  # saved states of other seeds are discarded, so none that knows forgotten examples is used
            epochs=self._options.epochs,
            learning_rate=self._options.learning_rate,
            replay_share=self._options.replay_share if self._general else 0.0,
            draft_tokens=self._draft.draft_tokens,
            states_kind=self._kind,
        )

    def _report(self, progress: TrainingProgress) -> None:
        self._progress = progress


@contextmanager
def trainer_lock(folder: Path) -> Iterator[bool]:
    """Tries to take the lock of trainers on a learning folder; yields whether it was taken.

    The lock is held until the block ends, across threads and processes.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
