"""Trains a draft on the target's own answers.

A step takes some recent answers and some replay examples, which keep the draft from forgetting what it learned before
(rehearsal: Robins, 1995). The loss is the cross-entropy of the answers' tokens. All weights are trained, with AdamW.
`draft_trainee` and `head_trainee` state what differs between draft models and heads.

A step runs in passes of a few rows, so that a trainer in the background can yield often: `pause` and `should_stop` are
called before each pass. Every random choice is a function of the seed and the step, so the saved state holds only
weights, the optimizer's moments, and counters. A killed trainer continues from the last saved step.

Training stops early: the held-out examples are scored several times per epoch, the best weights are kept, and training
ends once they have not improved for some evaluations.
"""

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.learning.draft_trainee import DraftTrainee
from actors.learning.evaluation import CPU, do_nothing
from actors.learning.trainable import Row, Weights, cannot_write, diverged, fingerprint_of
from actors.learning.trainee import Load, Trainee, TrainingOptions
from actors.models.weights import is_finite
from cluster.errors import ModelError
from cluster.learning import Example, Figures

STATE = "state.safetensors"
COUNTERS = ("step", "best_step", "stale", "seconds")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a training after a step."""

    step: int
    steps: int  # planned steps; training may stop earlier
    loss: float  # mean loss per token in this step
    agreement: float  # share of this step's tokens that the draft's first choice equals
    seconds: float  # time trained so far, interrupted parts included


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Outcome of a training."""

    is_complete: bool  # False: stopped on request, no draft was written
    steps: int  # steps done
    best_step: int  # step at which the written weights were taken; 0: initial weights
    seconds: float
    before: Figures  # scores of the initial weights on the held-out examples
    after: Figures  # scores of the best weights on the held-out examples


def train(
    start: Path,
    out: Path,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    replay: Sequence[Example],
    options: TrainingOptions,
    *,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = do_nothing,
    state: Path | None = None,
    device: torch.device = CPU,
    load: Load = DraftTrainee,
) -> TrainingResult:
    """Trains the draft in folder `start` and writes a complete draft to folder `out`.

    The caller sets the number of threads. `pause` is called before each pass and may block. If `should_stop` returns
    True, the state is saved and no draft is written. With a folder `state`, an interrupted training continues from
    there, even if examples were added or removed since; a state with another start or other options is discarded.
    Without held-out examples the last weights are written.

    Raises ModelError if the draft cannot be loaded or trained, there are no examples, loss or weights become NaN or
    infinite, or a file cannot be written, as on a full disk; `out` then stays unchanged.
    """
    if not 0 <= options.replay_share < 1:
        raise ModelError(f"replay_share is {options.replay_share:g}; set it from 0 to below 1")
    trainee = load(start, device)
    training = _Training(trainee, examples, held_out, replay, options, pause)
    saved = None if state is None else _SavedState(state, f"{fingerprint_of(start)} {asdict(options)}")
    try:
        is_done = training.run(progress, should_stop, saved)
    except ModelError:
        if saved is not None:
            saved.remove()  # repeating the same steps would diverge again
        raise
    if not is_done:
        return training.result(is_complete=False)
    trainee.write(training.best, out)
    if saved is not None:
        saved.remove()
    return training.result(is_complete=True)


class _Training:
    """A training in progress: model, data, optimizer and best weights so far."""

    def __init__(
        self,
        trainee: Trainee,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        replay: Sequence[Example],
        options: TrainingOptions,
        pause: Callable[[], None],
    ) -> None:
        self._options = options
        self._pause = pause
        self._held_out = [example for example in held_out if example.answer]
        self._trainee = trainee
        self._rows = _flat(trainee.rows(examples, options.limits))
        self._replay = _flat(trainee.rows(replay, options.limits))
        if not self._rows:
            raise ModelError("there are no examples to train on; collect some, or name a file with --examples")
        self._parameters = [each for each in trainee.network.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=options.learning_rate, weight_decay=0.0, fused=True)
        self._steps_per_epoch = math.ceil(len(self._rows) / options.batch)
        self._step = 0
        self._seconds = 0.0
        self._before = self._figures()
        self.best = trainee.rounded()
        self._best_figures = self._before
        self._best_step = 0
        self._stale = 0  # evaluations since the best one

    @property
    def _steps(self) -> int:
        return max(1, round(self._options.epochs * self._steps_per_epoch))

    def result(self, *, is_complete: bool) -> TrainingResult:
        return TrainingResult(is_complete, self._step, self._best_step, self._seconds, self._before, self._best_figures)

    def run(
        self,
        progress: Callable[[TrainingProgress], None],
        should_stop: Callable[[], bool],
        saved: "_SavedState | None",
    ) -> bool:
        """Trains to the end; returns False if it was stopped."""
        if saved is not None and (found := saved.load()) is not None:
            self._resume(found)
        before = self._seconds
        started = time.monotonic()
        last_save = -math.inf  # the first step is saved, so a full disk ends a training before it costs time
        evaluate_every = max(1, self._steps_per_epoch // self._options.evaluations)
        while self._step < self._steps and self._stale < self._options.patience:
            losses = None if should_stop() else self._run_step(should_stop)
            self._seconds = before + time.monotonic() - started
            if losses is None:
                if saved is not None:
                    saved.save(self._state())
                return False
            progress(TrainingProgress(self._step, self._steps, *losses, self._seconds))
            if self._step % evaluate_every == 0 or self._step == self._steps:
                self._evaluate()
            self._seconds = before + time.monotonic() - started
            if saved is not None and time.monotonic() - last_save >= self._options.save_every_s:
                saved.save(self._state())
                last_save = time.monotonic()
        return True

    # ------------------------------------------------------------ steps

    def _run_step(self, should_stop: Callable[[], bool]) -> tuple[float, float] | None:
        """Runs a step and returns its loss and agreement; returns None, changing nothing, if it was stopped."""
        options = self._options
        rng = np.random.default_rng((options.seed, self._step))
        passes = self._trainee.passes(self._rows_of_step(), options, rng)
        self._optimizer.zero_grad(set_to_none=True)
        loss = agreement = 0.0
        for run_pass in passes:
            self._pause()
            if should_stop():
                return None
            found = run_pass()
            loss += found[0]
            agreement += found[1]
        if not math.isfinite(loss):
            raise diverged(self._step + 1, f"the loss is {loss}")
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, options.clip))
        if not math.isfinite(norm):
            raise diverged(self._step + 1, f"the gradient's norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * self._rate(self._step)
        self._optimizer.step()
        self._step += 1
        return loss, agreement

    def _rate(self, step: int) -> float:
        """Returns the factor of the learning rate at a step: a linear warm-up."""
        return min(1.0, (step + 1) / self._options.warmup_steps)

    def _rows_of_step(self) -> list[Row]:
        """Returns a step's rows: recent rows once per epoch, and replay rows, none repeated before all are used."""
        epoch, index = divmod(self._step, self._steps_per_epoch)
        batch = self._options.batch
        order = np.random.default_rng((self._options.seed, epoch, 0)).permutation(len(self._rows))
        found = [self._rows[place] for place in order[index * batch : (index + 1) * batch]]
        for place in range(self._step * self._options.replay_rows, (self._step + 1) * self._options.replay_rows):
            if self._replay:
                turn, at = divmod(place, len(self._replay))
                shuffled = np.random.default_rng((self._options.seed, turn, 1)).permutation(len(self._replay))
                found.append(self._replay[shuffled[at]])
        return found

    # ------------------------------------------------------------ early stopping

    def _evaluate(self) -> None:
        """Scores the held-out examples and stores the weights if they are the best so far."""
        for name, weight in self._trainee.network.named_parameters():
            if not is_finite(weight):
                raise diverged(self._step, f"{name} has NaN or infinite weights")
        figures = self._figures()
        if not self._held_out or figures.tokens_per_verify > self._best_figures.tokens_per_verify:
            self.best = self._trainee.rounded()
            self._best_figures = figures
            self._best_step = self._step
            self._stale = 0
        else:
            self._stale += 1

    def _figures(self) -> Figures:
        return Figures.of(self._trainee.score(self._held_out, self._options, self._pause))

    # ------------------------------------------------------------ saved state

    def _state(self) -> "_State":
        weights = self._trainee.network.named_parameters()
        tensors = {f"draft.{name}": weight.detach() for name, weight in weights if weight.requires_grad}
        for index, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": moment for name, moment in moments.items()}
        tensors |= {f"best_model.{name}": weight for name, weight in self.best.model.items()}
        tensors |= {f"best_head.{name}": weight for name, weight in self.best.head.items()}
        return _State(tensors, self._step, self._best_step, self._stale, self._seconds)

    def _resume(self, found: "_State") -> None:
        """Continues from a saved state. Scores the best weights again, since the held-out examples may differ."""
        self.best = Weights(found.of("best_model"), found.of("best_head"))
        self._trainee.restore(self.best)
        self._best_figures = self._figures()
        self._trainee.network.load_state_dict(found.of("draft"), strict=False)
        moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, moment in found.of("optimizer").items():
            index, _, kind = name.partition(".")
            moments[int(index)][kind] = moment
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(moments), "param_groups": groups})
        self._step, self._best_step = found.step, found.best_step
        self._stale, self._seconds = found.stale, found.seconds
        log.info("training continues after step %d", self._step)


def _flat(rows: Sequence[Sequence[Row]]) -> list[Row]:
    return [row for each in rows for row in each]


@dataclass(frozen=True, slots=True)
class _State:
    """Saved state of an interrupted training."""

    tensors: dict[str, Tensor]
    step: int
    best_step: int
    stale: int
    seconds: float

    def of(self, part: str) -> dict[str, Tensor]:
        """Returns the tensors whose names begin with `part` and a dot, keyed by the rest of the name."""
        return {
            name.removeprefix(f"{part}."): each for name, each in self.tensors.items() if name.startswith(f"{part}.")
        }


class _SavedState:
    """A training's state in a folder, replaced atomically; ignores the state of another training."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._path = folder / STATE
        self._fingerprint = fingerprint

    def save(self, state: _State) -> None:
        partial = self._path.with_suffix(".partial")
        counters = {name: getattr(state, name) for name in COUNTERS}
        metadata = {"fingerprint": self._fingerprint, "counters": json.dumps(counters)}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.touch(mode=0o600)
            save_file(state.tensors, partial, metadata)
            os.replace(partial, self._path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise cannot_write(self._path, error) from error

    def load(self) -> _State | None:
        """Returns the state; None if it is missing, unreadable, or belongs to another training."""
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            log.warning("training starts over: %s cannot be read: %s", self._path, error)
            return None
        if metadata.get("fingerprint") != self._fingerprint:
            log.info("training starts over: the state in %s belongs to another draft or other options", self._path)
            return None
        return _State(tensors, **json.loads(metadata["counters"]))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
