"""The trainer: waits for new examples, trains a candidate, judges it, and promotes it or records why not.

`Trainer.look` does one round and blocks while it trains; a thread calls it again and again. One trainer works on a
folder at a time; another one waits for the lock. What fails is counted, logged and tried again later, and promotes
nothing.
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from actors.learning.evaluation import score_draft
from actors.learning.examples import ExampleStore
from actors.learning.training import TrainingOptions, TrainingProgress, train
from actors.learning.versions import VersionFolder
from cluster.config import LearningOptions
from cluster.errors import SlipstreamError
from cluster.learning import (
    Comparison,
    Decision,
    Example,
    Figures,
    Manifest,
    SessionScore,
    State,
    compare,
    decide,
    is_held_out,
)
from protos.frozen import value

log = logging.getLogger(__name__)

RETRY_S = 600.0  # after a failure
LOCK = "trainer.lock"
OLDER_SHARE = 1.0  # older examples that are trained on beside each new one
EVALUATED = 400  # most examples of a kind that an evaluation scores


@value
class Draft:
    """The configured draft, and the target it drafts for."""

    folder: Path
    method: str
    target: str  # fingerprint
    draft_tokens: int


@value
class TrainerStatus:
    """What the trainer does and has done."""

    phase: str  # waiting, training, evaluating or locked out
    examples: int  # in the store, of this target
    new_examples: int  # since the last training
    version: int  # current
    progress: TrainingProgress | None
    counts: dict[str, int]  # trainings by outcome: promoted, rejected, failed, interrupted
    training_s: float
    before: Figures | None = None  # of the latest training, on held-out recent examples
    after: Figures | None = None


class Trainer:
    """Trains versions of one draft from the examples in a folder."""

    def __init__(
        self,
        options: LearningOptions,
        draft: Draft,
        replay: Sequence[Example],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._draft = draft
        self._folder = Path(options.folder).expanduser()
        self._store = ExampleStore.of(options)
        self._versions = VersionFolder(self._folder)
        self._general_training = [example for example in replay if not is_held_out(example)]
        self._general_held_out = [example for example in replay if is_held_out(example)][:EVALUATED]
        self._should_stop = should_stop
        self._clock = clock
        self._phase = "waiting"
        self._progress: TrainingProgress | None = None
        self._counts: Counter[str] = Counter()
        self._training_s = 0.0
        self._latest: Comparison | None = None
        self._not_before = 0.0  # no training until then, after a failure

    def status(self) -> TrainerStatus:
        """Returns the state; may be called from another thread while `look` runs."""
        store = ExampleStore.of(self._options)
        try:
            size = store.size(self._draft.target)
            new = store.size(self._draft.target, after=self._trained_to())
        finally:
            store.close()
        return TrainerStatus(
            phase=self._phase,
            examples=size.examples,
            new_examples=new.examples,
            version=self._versions.current(),
            progress=self._progress,
            counts=dict(self._counts),
            training_s=self._training_s,
            before=None if self._latest is None else self._latest.before,
            after=None if self._latest is None else self._latest.after,
        )

    def look(self) -> Manifest | None:
        """Trains if there are enough new examples; returns the new version's record."""
        if self._clock() < self._not_before:
            return None
        try:
            with _locked(self._folder / LOCK) as is_ours:
                self._phase = "waiting" if is_ours else "locked out"
                return self._train_if_due() if is_ours else None
        except (SlipstreamError, OSError, sqlite3.Error, RuntimeError) as error:
            self._counts["failed"] += 1
            self._not_before = self._clock() + RETRY_S
            log.exception("training failed, and the draft stays as it is; next try in %g s: %s", RETRY_S, error)
            return None
        finally:
            self._progress = None

    def _trained_to(self) -> int:
        """Returns the id of the newest example that a version of this target has seen."""
        return max((one.newest for one in self._versions.history() if one.target == self._draft.target), default=0)

    def _train_if_due(self) -> Manifest | None:
        seen = self._trained_to()
        size = self._store.size(self._draft.target, after=seen)
        if size.examples < self._options.min_examples:
            return None
        new = self._store.read(self._draft.target, after=seen)
        old = [example for example in self._store.read(self._draft.target) if example not in set(new)]
        chosen = random.Random(size.newest).sample(old, min(len(old), round(OLDER_SHARE * len(new))))
        return self._try(new, chosen, size.newest)

    def _try(self, new: Sequence[Example], old: Sequence[Example], newest: int) -> Manifest | None:
        """Trains and judges a candidate."""
        began = self._clock()
        parent = self._usable_version()
        start = self._versions.folder_of(parent) if parent else self._draft.folder
        held_out = [example for example in new if is_held_out(example)][-EVALUATED:]
        # Training stops by one half, and the other half judges what it has chosen.
        stopping, recent = held_out[::2], held_out[1::2]
        learned = [example for example in (*old, *new) if not is_held_out(example)]
        candidate = self._folder / "training" / "candidate"
        self._phase = "training"
        result = train(
            start,
            candidate,
            learned,
            stopping,
            self._general_training,
            self._training_options(),
            progress=self._report,
            should_stop=self._should_stop,
            state=self._folder / "training" / "state",
        )
        if not result.is_complete:
            self._counts["interrupted"] += 1
            return None
        self._phase = "evaluating"
        of_recent = compare(self._scores(start, recent), self._scores(candidate, recent))
        general = self._general_held_out
        of_general = compare(self._scores(start, general), self._scores(candidate, general)) if general else None
        decision = decide(of_recent, of_general, self._options.max_general_loss, self._options.min_sessions)
        self._latest = of_recent
        seconds = self._clock() - began
        self._training_s += seconds
        manifest = Manifest(
            version=1,  # the folder assigns the number
            parent=parent,
            created=self._clock(),
            state=State.CURRENT if decision.is_better else State.REJECTED,
            reason=decision.reason,
            method=self._draft.method,
            target=self._draft.target,
            examples=len(learned),
            newest=newest,
            tokens=sum(len(example.answer) for example in learned),
            seconds=seconds,
            recent=of_recent,
            general=of_general,
        )
        return self._record(manifest, decision, candidate)

    def _record(self, manifest: Manifest, decision: Decision, candidate: Path) -> Manifest:
        manifest = self._versions.add(manifest, partial(shutil.copytree, candidate, dirs_exist_ok=True))
        if decision.is_better:
            self._versions.promote(manifest.version)
        self._versions.remove_old(self._options.keep_versions)
        self._counts["promoted" if decision.is_better else "rejected"] += 1
        outcome = "promoted" if decision.is_better else "not promoted"
        log.info("draft version %d is %s: %s", manifest.version, outcome, decision.reason)
        return manifest

    def _usable_version(self) -> int:
        """Returns the current version, or 0 if it learned from another target."""
        current = self._versions.current()
        manifests = {one.version: one for one in self._versions.history()}
        return current if current in manifests and manifests[current].target == self._draft.target else 0

    def _scores(self, draft: Path, examples: Sequence[Example]) -> list[SessionScore]:
        return score_draft(draft, examples, self._draft.draft_tokens)

    def _training_options(self) -> TrainingOptions:
        return TrainingOptions(
            epochs=self._options.epochs,
            learning_rate=self._options.learning_rate,
            replay_share=self._options.replay_share if self._general_training else 0.0,
            draft_tokens=self._draft.draft_tokens,
        )

    def _report(self, progress: TrainingProgress) -> None:
        self._progress = progress


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Tries to take a lock between processes; True if it is ours until the block ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
