"""Trains the draft on the target's text: cross-entropy against the target's top next tokens.

Reads the chunk files of `generate.py`, including those that appear during training. Acceptance at temperature 0
requires the same top token, so the loss sharpens the teacher's probabilities. The vocabulary is by far the largest part
of a small draft, so the loss covers only the teacher's tokens in a batch and a random sample of the others. This is
several times cheaper, and over time it pushes down the same wrong tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from chunks import Example, read_chunk
from copying import CopyConfig, CopyRows
from fast import ATTENTION, AttentionObserver, VocabularyRows
from guide import Guide
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.drafters.model.recurrent_head import FILE
from actors.learning.recurrent_head import TrainableRecurrentHead

POSITIONS_AT_ONCE = 256
BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class TrainConfig:
    """Training parameters."""

    data: tuple[Path, ...]
    out: Path
    seed: int
    minutes: float
    batch: int  # sequences per step
    copy_share: float  # share of synthetic sequences that teach copying
    random_share: float  # share of random tokens among these; the others repeat real text
    copy_vocabulary: int  # distinct tokens in random rows
    guidance: float  # weight of the attention loss
    guided_layers: tuple[int, int]
    guided_heads: int
    muon: bool
    learning_rate: float
    embedding_share: float  # the embedding's learning rate, relative to `learning_rate`
    warmup_steps: int
    weight_decay: float
    user_weight: float  # loss weight of positions outside the assistant's answer
    sharpening: float  # exponent on the teacher's probabilities
    top_k: int  # number of teacher tokens per position in the loss
    negatives: int  # random vocabulary entries besides the teacher's tokens
    further: int  # tokens that the recurrent head predicts after the next; 0: no recurrent head
    further_places: int  # maximum positions per sequence that train the recurrent head
    further_weight: float  # loss weight of the recurrent head's predictions
    head_only: bool  # train only the recurrent head
    head_width: int
    save_minutes: float
    reload_minutes: float


@dataclass(frozen=True)
class Batch:
    """Padded sequences with all their scored positions, flattened."""

    tokens: Tensor  # [sequences, longest]
    rows: Tensor  # [positions]
    columns: Tensor  # [positions]
    top_ids: Tensor  # [positions, k]
    top_probs: Tensor  # [positions, k]
    weights: Tensor  # [positions]
    begins: Tensor  # [places]: start positions for the recurrent head
    further: Tensor  # [places, further]: the positions after each start


class Data:
    """All examples loaded so far, in batches of similar length."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._rng = np.random.default_rng(config.seed)
        self._read: set[Path] = set()
        self._fresh: list[Example] = []
        self.examples: list[Example] = []
        self.refresh()
        if not self.examples:
            raise ValueError(f"no chunk files in {[str(folder) for folder in config.data]}; run generate.py first")
        copying = CopyConfig(random_share=config.random_share, vocabulary=config.copy_vocabulary)
        self._copies = CopyRows(copying, self._opening(), self.examples, config.seed)

    def refresh(self) -> None:
        """Loads chunk files that have appeared since the last call."""
        for path in sorted(path for folder in self._config.data for path in folder.glob("*.npz")):
            if path not in self._read:
                self._read.add(path)
                chunk = read_chunk(path)
                self.examples.extend(chunk)
                self._fresh.extend(chunk)

    def _opening(self) -> np.ndarray:
        """Returns the common prefix of the sequences."""
        some = np.stack([e.tokens[:32] for e in self.examples[:256]])
        same = (some == some[0]).all(axis=0)
        return some[0, : same.size if same.all() else int(same.argmin())]

    def sample(self, sequences: int, length: int) -> Tensor:
        """Returns up to `sequences` sequences cut to `length`, as [sequences, length]."""
        found = [e.tokens[:length] for e in self.examples if e.tokens.size >= length][:sequences]
        return torch.from_numpy(np.stack(found).astype(np.int64))

    def batches(self) -> Iterator[Batch]:
        """Yields batches without end, each with a share of copying rows; new examples come first."""
        copies = round(self._config.copy_share * self._config.batch)
        size = self._config.batch - copies
        for examples in self._groups(size) if size else iter(list, None):
            yield self._collate([*examples, *(self._copies.draw() for _ in range(copies))])

    def _groups(self, size: int) -> Iterator[list[Example]]:
        while True:
            self._fresh.clear()
            examples = self.examples
            order = np.array([examples[i].tokens.size for i in range(len(examples))])
            order = np.argsort(order + self._rng.uniform(0, 24, len(order)))
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            for group in self._rng.permutation(len(groups)):
                yield [examples[i] for i in groups[group]]
                while len(self._fresh) >= size:
                    yield [self._fresh.pop() for _ in range(size)]

    def _collate(self, examples: list[Example]) -> Batch:
        longest = max(e.tokens.size for e in examples)
        tokens = np.zeros((len(examples), longest), np.int64)
        for row, example in enumerate(examples):
            tokens[row, : example.tokens.size] = example.tokens
        top_k = self._config.top_k
        in_answer = [e.scored >= e.answer_start - 1 for e in examples]
        weights = np.where(np.concatenate(in_answer), 1.0, self._config.user_weight)
        rows = np.repeat(np.arange(len(examples)), [e.scored.size for e in examples])
        columns = np.concatenate([e.scored for e in examples]).astype(np.int64)
        begins = self._places(rows, columns)
        return Batch(
            tokens=torch.from_numpy(tokens),
            begins=torch.from_numpy(begins),
            further=torch.from_numpy(begins[:, None] + np.arange(1, self._config.further + 1)),
            rows=torch.from_numpy(rows),
            columns=torch.from_numpy(columns),
            top_ids=torch.from_numpy(np.concatenate([widened(e.top_ids, top_k, "edge") for e in examples])),
            top_probs=torch.from_numpy(np.concatenate([widened(e.top_probs, top_k, "constant") for e in examples])),
            weights=torch.from_numpy(weights.astype(np.float32)),
        )

    def _places(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Draws start positions in each sequence whose next `further` positions are all scored."""
        further = self._config.further
        last = np.arange(len(rows)) + further
        whole = last < len(rows)
        last = np.minimum(last, len(rows) - 1)
        whole &= (rows[last] == rows) & (columns[last] == columns + further)
        drawn = self._rng.random(len(rows))
        order = np.lexsort((drawn, rows))
        order = order[whole[order]]
        within = np.arange(len(order)) - np.searchsorted(rows[order], rows[order])
        return order[within < self._config.further_places] if further else np.empty(0, np.int64)


def widened(columns: np.ndarray, width: int, mode: Literal["edge", "constant"]) -> np.ndarray:
    """Returns the first `width` columns; pads missing columns with the last column or zeros."""
    columns = columns[:, :width].astype(np.float32 if columns.dtype.kind == "f" else np.int64)
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), mode=mode) if columns.shape[1] < width else columns


class SoftTargetLoss(torch.autograd.Function):
    """Weighted cross-entropy of softmax(hidden @ head.T + offset) against a few soft targets per row.

    The logits of all positions would take hundreds of megabytes, so one pass computes loss and gradients slice by
    slice. Returns the mean loss and two top-1 agreement rates with the teacher: over the first `first` rows, and over
    the others.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        offset: Tensor,
        labels: Tensor,
        wanted: Tensor,
        weights: Tensor,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(head, dtype=torch.float32)
        loss = torch.zeros(())
        is_agreed = []
        shares = weights / weights.sum()
        named = int((offset == 0).sum())  # the teacher's entries, which precede the random ones
        for part in torch.arange(len(hidden)).split(POSITIONS_AT_ONCE):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            logits = (hidden[rows] @ head.T).float().add_(offset)
            highest = logits.amax(dim=1, keepdim=True)
            likeliest = logits[:, :named].argmax(dim=1)
            is_agreed.append(likeliest == labels[rows, 0])
            at_labels = logits.gather(1, labels[rows])
            probs = logits.sub_(highest).exp_()
            total = probs.sum(dim=1, keepdim=True)
            losses = (highest + total.log())[:, 0] - (wanted[rows] * at_labels).sum(dim=1)
            loss = loss + (losses * shares[rows]).sum()
            gradient = probs.div_(total).scatter_add_(1, labels[rows], -wanted[rows]).mul_(shares[rows, None])
            gradient = gradient.to(hidden.dtype)
            hidden_grad[rows] = gradient @ head
            head_grad += gradient.T @ hidden[rows]
        ctx.save_for_backward(hidden_grad, head_grad)
        agreed = torch.cat(is_agreed) * weights
        parts = (slice(0, first), slice(first, None))
        return loss, torch.stack([agreed[part].sum() / weights[part].sum() for part in parts])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * upstream[0], head_grad * upstream[0], None, None, None, None, None


@dataclass(frozen=True)
class StepResult:
    """Loss and agreement of one batch."""

    loss: Tensor
    agreement: float  # top-1 agreement over the sampled vocabulary
    further: float  # top-1 agreement of the recurrent head; nan without one


def distillation_loss(
    model: PreTrainedModel,
    rows: VocabularyRows,
    batch: Batch,
    config: TrainConfig,
    recurrent: TrainableRecurrentHead | None = None,
    observe: AttentionObserver | None = None,
) -> StepResult:
    """Computes the cross-entropy against the sharpened teacher over the sampled vocabulary."""
    vocabulary, labels, others = sampled_vocabulary(batch.top_ids, rows.size, config.negatives)
    inputs, head = rows.select(batch.tokens, vocabulary)
    with torch.set_grad_enabled(not config.head_only):
        hidden = model.get_decoder()(inputs_embeds=inputs, use_cache=False, observe=observe).last_hidden_state
    hidden = hidden[batch.rows, batch.columns]
    state = hidden[batch.begins]
    states = [hidden]
    for later in batch.further.T if recurrent else ():
        state = recurrent(state, inputs[batch.rows[later], batch.columns[later]])
        states.append(state)
    later = batch.further.T.flatten()
    weights = torch.cat(((not config.head_only) * batch.weights, config.further_weight * batch.weights[later]))
    offset = torch.zeros(len(vocabulary))
    offset[-config.negatives :] = math.log(others / config.negatives)  # weights each sample
    wanted = batch.top_probs.pow(config.sharpening)
    wanted = wanted / wanted.sum(dim=1, keepdim=True)
    labels = torch.cat((labels, labels[later]))
    wanted = torch.cat((wanted, wanted[later]))
    loss, agreed = SoftTargetLoss.apply(
        torch.cat(states).to(torch.bfloat16), head.to(torch.bfloat16), offset, labels, wanted, weights, len(hidden)
    )
    return StepResult(loss, *agreed.detach().tolist())


def sampled_vocabulary(top_ids: Tensor, size: int, negatives: int) -> tuple[Tensor, Tensor, int]:
    """Returns the sampled ids, the teacher's tokens as indices into them, and the number of other ids."""
    named, labels = top_ids.unique(return_inverse=True)
    is_other = torch.ones(size, dtype=torch.bool)
    is_other[named] = False
    others = is_other.nonzero()[:, 0]
    drawn = others[torch.randint(len(others), (negatives,))]
    return torch.cat((named, drawn)), labels, len(others)


def optimizers_for(
    model: PreTrainedModel, head: TrainableRecurrentHead | None, config: TrainConfig
) -> list[torch.optim.Optimizer]:
    """Returns Muon for matrices if configured, and AdamW for the rest; `VocabularyRows` updates the embedding."""
    embedding = model.get_input_embeddings().weight
    parameters = [*(() if config.head_only else model.parameters()), *(head.parameters() if head else ())]
    matrices = [p for p in parameters if p.dim() > 1 and p is not embedding]
    vectors = [p for p in parameters if p.dim() <= 1]
    rate = config.learning_rate
    decay = config.weight_decay
    adamw = torch.optim.AdamW(vectors, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)
    if config.muon:
        return [torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]
    adamw.add_param_group({"params": matrices, "weight_decay": decay})
    return [adamw]


def learning_rate(config: TrainConfig, step: int, elapsed: float) -> float:
    """Returns the learning rate: linear warm-up over steps, times a cosine over the time limit."""
    done = min(1.0, elapsed / (60 * config.minutes))
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup_steps) * cosine


def save(model: PreTrainedModel, folder: Path, head: TrainableRecurrentHead | None = None, further: int = 0) -> None:
    """Writes the bfloat16 draft to a temporary folder, then moves each file into `folder`."""
    partial = folder.with_name(folder.name + ".partial")
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
    if head:
        copy.config.tokens_per_forward = 1 + further
    copy.save_pretrained(partial)
    if head:
        head.save(partial)
    folder.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        os.replace(file, folder / file.name)
    partial.rmdir()


def train(model: PreTrainedModel, head: TrainableRecurrentHead | None, data: Data, config: TrainConfig) -> None:
    """Trains until the time limit; saves every `save_minutes` and at the end."""
    optimizers = optimizers_for(model, head, config)
    rows = VocabularyRows(model.get_input_embeddings().weight, BETAS)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    body = [p for group in groups for p in group["params"]]
    start = time.monotonic()
    saved = reloaded = 0.0
    agreement = 0.5
    further = 0.0
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=60 * config.minutes, note="")
        for step, batch in enumerate(data.batches()):
            elapsed = time.monotonic() - start
            rate = learning_rate(config, step, elapsed)
            for group in groups:
                group["lr"] = rate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                guide = Guide(batch.tokens, config.guided_layers, config.guided_heads) if config.guidance else None
                result = distillation_loss(model, rows, batch, config, head, guide)
            (result.loss + config.guidance * guide.loss() if guide else result.loss).backward()
            torch.nn.utils.clip_grad_norm_([*body, rows.selected], 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if not config.head_only:
                rows.step(config.embedding_share * rate)
            agreement += 0.02 * (result.agreement - agreement)
            further += 0.02 * (result.further - further) if config.further else 0.0
            note = f"step {step}, {len(data.examples)} sequences, agreement {agreement:.3f}, further {further:.3f}"
            progress.update(task, completed=elapsed, note=note)
            if step % 100 == 0:
                progress.console.print(note)
            if elapsed >= 60 * config.minutes:
                break
            if elapsed - saved > 60 * config.save_minutes:
                saved = elapsed
                save(model, config.out, head, config.further)
            if elapsed - reloaded > 60 * config.reload_minutes:
                reloaded = elapsed
                data.refresh()
        progress.console.print(note)
    save(model, config.out, head, config.further)


def recurrent_head(folder: Path, model: PreTrainedModel, config: TrainConfig) -> TrainableRecurrentHead | None:
    """Loads the recurrent head from the folder, or creates one; None if `config.further` is 0."""
    if not config.further:
        return None
    known = (folder / FILE).exists()
    return (
        TrainableRecurrentHead.load(folder)
        if known
        else TrainableRecurrentHead(model.config.hidden_size, config.head_width)
    )


def training_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `TrainConfig` and the path of the initial draft."""
    parser.add_argument("start", help="initial draft: Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="folder for the trained draft")
    parser.add_argument("data", type=Path, nargs="+", help="folders with chunk files")
    parser.add_argument("--minutes", type=float, default=40.0, help="stop after this time")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--copy-share", type=float, default=0.19, help="share of rows that teach copying")
    parser.add_argument("--random-share", type=float, default=0.1, help="share of these rows with random tokens")
    parser.add_argument("--copy-vocabulary", type=int, default=8192, help="distinct tokens in random rows")
    parser.add_argument("--guidance", type=float, default=0.2, help="weight of the attention loss")
    parser.add_argument("--guided-layers", type=int, nargs=2, default=[1, 3], help="first and last of the added layers")
    parser.add_argument("--guided-heads", type=int, default=4, help="supervised heads per guided layer")
    parser.add_argument(
        "--muon", action=argparse.BooleanOptionalAction, default=True, help="Muon for matrices; slow for wide layers"
    )
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="peak learning rate")
    parser.add_argument("--embedding-share", type=float, default=0.2, help="relative learning rate of the embedding")
    parser.add_argument("--warmup-steps", type=int, default=60, help="steps of linear warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.02, help="weight decay of matrices")
    parser.add_argument("--user-weight", type=float, default=0.3, help="weight of positions outside the answers")
    parser.add_argument("--sharpening", type=float, default=1.5, help="exponent on the teacher's probabilities")
    parser.add_argument("--top-k", type=int, default=10, help="teacher tokens per position in the loss")
    parser.add_argument("--negatives", type=int, default=2048, help="random vocabulary entries per step")
    parser.add_argument("--further", type=int, default=0, help="tokens the recurrent head predicts")
    parser.add_argument("--head-only", action="store_true", help="train only the recurrent head")
    parser.add_argument("--further-places", type=int, default=48, help="positions per sequence that train the head")
    parser.add_argument("--further-weight", type=float, default=0.5, help="loss weight of the recurrent head")
    parser.add_argument("--head-width", type=int, default=1024, help="width of the recurrent head")
    parser.add_argument("--save-minutes", type=float, default=5.0, help="minutes between saves")
    parser.add_argument("--reload-minutes", type=float, default=2.0, help="minutes between checks for new chunks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")


def parse_options(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, TrainConfig]:
    arguments = parser.parse_args()
    arguments.data = tuple(arguments.data)
    arguments.guided_layers = tuple(arguments.guided_layers)
    return arguments, TrainConfig(**{name: getattr(arguments, name) for name in TrainConfig.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    training_options(parser)
    arguments, config = parse_options(parser)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(arguments.start, dtype=torch.float32, attn_implementation=ATTENTION)
    train(model, recurrent_head(Path(arguments.start), model, config), Data(config), config)


if __name__ == "__main__":
    main()
