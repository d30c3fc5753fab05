"""Trains a head on stored states, measures held-out agreement, and writes resumable checkpoints."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from cluster.errors import ModelError
from examples.train_head.checkpoints import read_state, write_head, write_state
from examples.train_head.heads.dflash_module import DFlashModule
from examples.train_head.heads.draft_module import DraftModule
from examples.train_head.heads.draft_vocabulary import frequent_tokens
from examples.train_head.heads.eagle import EagleModule
from examples.train_head.heads.medusa_module import MedusaModule
from examples.train_head.heads.mlp_speculator_module import MlpSpeculatorModule
from examples.train_head.heads.target_parts import TargetParts
from examples.train_head.objective import Learned, Teacher, learned
from examples.train_head.options import HeadKind, HeadOptions, Running, Schedule
from examples.train_head.sampling_order import batches, held_out
from examples.train_head.shards import Shards, StoredSequence

CURVE = "curve.jsonl"
LATEST = "latest"
BEST = "best"
BIG = ("lm_head", "lm_heads", "emb", "head")  # parameters with a row per token
SMOOTHING = 0.05  # moving-average weight of training loss and agreement


def head_to_train(options: HeadOptions, target: TargetParts, shards: Shards) -> DraftModule:
    """Creates the untrained head. Raises ModelError if the stored states or options do not fit its kind."""
    vocabulary = target.sizes.vocabulary
    ids = frequent_tokens(shards.description.token_counts, options.draft_vocabulary)
    if options.kind is HeadKind.MEDUSA:
        return MedusaModule(target, ids, options.unroll)
    if options.kind is HeadKind.MLP_SPECULATOR:
        if len(ids) < vocabulary:
            raise ModelError("the MLPSpeculator layout has no draft vocabulary; remove --draft-vocabulary")
        return MlpSpeculatorModule(target, options.unroll, options.seed)
    reads = shards.description.layers
    if not reads:
        raise ModelError(
            f"a head of kind {options.kind.value} reads layer states, but only final states are stored;"
            " run examples.train_head.states without --final-only"
        )
    if options.kind is HeadKind.DFLASH:
        counts = shards.description.token_counts
        mask_token = counts.index(min(counts))  # the rarest token
        return DFlashModule(target, reads, ids, options.layers, options.unroll, mask_token, options.seed)
    return EagleModule(target, reads, ids, options.layers, options.seed)


@dataclass(frozen=True, slots=True)
class Point:
    """Point of the learning curve."""

    step: int
    positions: int  # training positions so far
    seconds: float  # total over all runs
    loss: float
    agreement: list[float]  # in training, by unrolled step
    held_out: list[float]
    held_out_sequences: int  # grows while shards are still being written
    held_out_loss: float


class Training:
    """Trains one head and saves it to a folder."""

    def __init__(
        self, out: Path, target: TargetParts, shards: Shards, head: HeadOptions, schedule: Schedule, running: Running
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._shards = shards
        self._head = head
        self._schedule = schedule
        self._running = running
        self._held_out = held_out(shards.sequences)[: running.held_out]
        self._device = torch.device(running.device)
        self._dtype: torch.dtype = getattr(torch, running.dtype)
        self._made_by = asdict(head) | asdict(schedule) | {"kind": head.kind.value}
        self.module = head_to_train(head, target, shards).to(self._device)
        self._optimizer = torch.optim.AdamW(self._groups(), lr=schedule.learning_rate, betas=(0.9, 0.95))
        self.step = 0
        self._positions = 0
        self._seconds = 0.0
        self._best = 0.0
        self._loss = 0.0
        self._agreement = torch.zeros(head.unroll)
        lm_head = target.lm_head()[self.module.token_ids.cpu()].to(self._device, self._dtype)
        self._teacher = Teacher(lm_head, shards.description.opening)
        self._resume()

    def run(self) -> None:
        """Trains until the last step or the time limit; saves every `save_every` steps and at the end."""
        started = time.monotonic()
        before = self._seconds
        order = batches(self._shards.sequences, self._schedule.batch, self._head.seed, self.step)
        with Progress() as progress:
            task = progress.add_task("training", total=self._schedule.steps, completed=self.step)
            while self.step < self._schedule.steps and self._seconds - before < 60 * self._running.minutes:
                self._learn(next(order))
                self._seconds = before + time.monotonic() - started
                shown = " ".join(f"{share:.3f}" for share in self._agreement.tolist())
                progress.update(task, completed=self.step, description=f"loss {self._loss:.3f}, agreement {shown}")
                if self.step % self._running.save_every == 0:
                    self._save()
        if self.step % self._running.save_every:
            self._save()

    @torch.no_grad()
    def held_out(self) -> Learned:
        """Returns the mean loss and agreement over held-out sequences."""
        found = [self._forward([sequence]) for sequence in self._held_out]
        agreement = torch.stack([one.agreement for one in found]).mean(dim=0)
        return Learned(torch.stack([one.loss for one in found]).mean(), agreement)

    def _learn(self, sequences: Sequence[StoredSequence]) -> None:
        torch.manual_seed(self._head.seed * 1_000_003 + self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.learning_rate * self._schedule.rate(self.step) * group["share"]
        found = self._forward(sequences, self._schedule.scored_share)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward([found.loss])
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._optimizer.step()
        weight = max(SMOOTHING, 1 / (self.step + 1))
        self._loss += weight * (found.loss.item() - self._loss)
        self._agreement += weight * (found.agreement.cpu() - self._agreement)
        self._positions += sum(map(len, sequences))
        self.step += 1

    def _forward(self, sequences: Sequence[StoredSequence], share: float = 1.0) -> Learned:
        batch = self._shards.batch(sequences, self._device)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not torch.float32):
            return learned(self.module, batch, self._teacher, self._head.unroll, share)

    # ------------------------------------------------------------ optimizer and checkpoints

    def _groups(self) -> list[dict[str, Any]]:
        big: list[Tensor] = []
        rest: list[Tensor] = []
        for name, parameter in self.module.named_parameters():
            (big if name.split(".")[0] in BIG else rest).append(parameter)
        decay = self._schedule.weight_decay
        return [
            {"params": [one for one in rest if one.ndim > 1], "share": 1.0, "weight_decay": decay},
            {"params": [one for one in rest if one.ndim == 1], "share": 1.0, "weight_decay": 0.0},
            {"params": big, "share": self._schedule.lm_head_rate, "weight_decay": 0.0},
        ]

    def _save(self) -> None:
        found = self.held_out()
        point = Point(
            step=self.step,
            positions=self._positions,
            seconds=round(self._seconds, 1),
            loss=round(self._loss, 4),
            agreement=_rounded(self._agreement),
            held_out=_rounded(found.agreement),
            held_out_sequences=len(self._held_out),
            held_out_loss=round(found.loss.item(), 4),
        )
        with (self._out / CURVE).open("a") as curve:
            curve.write(json.dumps(asdict(point)) + "\n")
        head = self.module.published()
        write_head(self._out / LATEST, head, self._dtype)
        if point.held_out[0] > self._best:
            self._best = point.held_out[0]
            write_head(self._out / BEST, head, self._dtype)
        state: dict[str, Any] = {"made_by": self._made_by, "module": self.module.state_dict()}
        state |= {"optimizer": self._optimizer.state_dict(), "step": self.step, "positions": self._positions}
        state |= {"seconds": self._seconds, "best": self._best, "loss": self._loss, "agreement": self._agreement}
        state |= {"held_out_sequences": len(self._held_out)}
        write_state(self._out, state)

    def _resume(self) -> None:
        state = read_state(self._out, self._made_by)
        if state is None:
            return
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._positions = state["positions"]
        self._seconds = state["seconds"]
        if state.get("held_out_sequences") == len(self._held_out):  # otherwise not comparable
            self._best = state["best"]
        self._loss = state["loss"]
        self._agreement = state["agreement"]


def _rounded(shares: Tensor) -> list[float]:
    return [round(share, 4) for share in shares.tolist()]
