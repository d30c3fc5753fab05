"""Generates a draft's training data with the target: mostly greedy answers to many prompts.

Each chunk file holds whole sequences (prompt and answer) and, for every generated position, the target's `top_k` next
tokens with their probabilities. Generation yields these at no cost, so training needs no forward pass of the target.
Chunk files appear only when complete, so training can start with the first one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from chunks import Example, write_chunk
from prompts import DEFAULT_PROMPTS, Prompt, PromptSource
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from slots import ATTENTION, SlotCache, feed
from target import ChatFrame, TargetSource, end_of_turn_ids
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GenerateConfig:
    """Lengths, sampling and amount of generated text."""

    out: Path
    seed: int
    minutes: float
    slots: int
    answer_tokens: int  # maximum tokens per answer
    user_tokens: int  # maximum tokens that the target adds to a user turn
    max_prompt: int  # maximum prompt tokens; longer prompts are skipped
    greedy_share: float  # share of greedy answers; the others are sampled at up to `max_temperature`
    max_temperature: float
    user_temperature: float
    top_k: int
    chunk_sequences: int


@dataclass
class Sequence:
    """Unfinished user turn and answer."""

    kind: str
    tokens: list[int]
    fed: int  # tokens already in the cache
    user_budget: int  # tokens the target may still add to the user's turn
    answer_budget: int
    temperature: float
    answer_start: int = -1  # index of the answer's first token; -1 during the user turn
    scored: list[int] = field(default_factory=list)  # indices whose next token the target predicted
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_probs: list[np.ndarray] = field(default_factory=list)

    @property
    def next_token(self) -> int:
        return self.tokens[self.fed]

    @property
    def wants_choice(self) -> bool:
        """Returns True if the last known token was just fed."""
        return self.fed == len(self.tokens)

    def finished(self) -> Example:
        columns = np.array(self.scored), np.stack(self.top_ids), np.stack(self.top_probs)
        return Example(self.kind, np.array(self.tokens), self.answer_start, *columns)


class Author:
    """Starts sequences from prompts, and extends them by the target's choices."""

    def __init__(
        self,
        config: GenerateConfig,
        prompts: Iterator[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        ends: frozenset[int],
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._ends = ends
        self._rng = random.Random(config.seed)
        self.frame = ChatFrame.of(tokenizer)

    def begin(self) -> Sequence:
        """Starts the next sequence; every slot's cache already holds the ids before the user turn."""
        while True:
            prompt = next(self._prompts)
            tokens = self.frame.prompt(self._tokenizer, prompt.text)
            longest = len(tokens) + (self._config.user_tokens if prompt.is_open else 0)
            if longest > self._config.max_prompt:
                continue
            if prompt.is_open:
                tokens = tokens[: len(tokens) - len(self.frame.after_user)]
            return self._sequence(prompt, tokens)

    def extend(self, sequence: Sequence, token: int) -> bool:
        """Appends the target's choice; returns whether the sequence continues."""
        if sequence.answer_start < 0:
            sequence.user_budget -= 1
            if token not in self._ends:
                sequence.tokens.append(token)
            if token in self._ends or sequence.user_budget == 0:
                self._open_answer(sequence)
            return True
        sequence.tokens.append(token)
        sequence.answer_budget -= 1
        return token not in self._ends and sequence.answer_budget > 0

    def temperature(self, sequence: Sequence) -> float:
        return self._config.user_temperature if sequence.answer_start < 0 else sequence.temperature

    def _sequence(self, prompt: Prompt, tokens: list[int]) -> Sequence:
        config = self._config
        is_greedy = self._rng.random() < config.greedy_share
        return Sequence(
            kind=prompt.kind,
            tokens=tokens,
            fed=len(self.frame.before_user),
            user_budget=config.user_tokens,
            answer_budget=config.answer_tokens,
            temperature=0.0 if is_greedy else self._rng.uniform(0.1, config.max_temperature),
            answer_start=-1 if prompt.is_open else len(tokens),
        )

    def _open_answer(self, sequence: Sequence) -> None:
        sequence.tokens.extend(self.frame.after_user)
        sequence.answer_start = len(sequence.tokens)


class ChunkWriter:
    """Collects finished sequences and writes them in chunks."""

    def __init__(self, config: GenerateConfig) -> None:
        self._config = config
        self._waiting: list[Sequence] = []
        self._chunks = 0
        self.answer_tokens = 0
        config.out.mkdir(parents=True, exist_ok=True)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self.answer_tokens += len(sequence.tokens) - sequence.answer_start
        if len(self._waiting) == self._config.chunk_sequences:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        path = self._config.out / f"chunk-{self._config.seed:03d}-{self._chunks:04d}.npz"
        write_chunk(path, [sequence.finished() for sequence in self._waiting])
        self._waiting.clear()
        self._chunks += 1


def choose(logits: Tensor, temperatures: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's next token at its temperature (0: greedy), the `top_k` ids, and their probabilities."""
    values, ids = logits.topk(top_k, dim=-1)
    values = values.float()
    scaled = values / temperatures.clamp(min=1e-6)[:, None]
    noise = -torch.empty_like(scaled).exponential_().log()
    noise[temperatures == 0] = 0.0
    picks = (scaled + noise).argmax(dim=-1)
    return ids.gather(1, picks[:, None])[:, 0], ids, values.softmax(dim=-1)


@torch.inference_mode()
def write_data(source: TargetSource, prompt_source: PromptSource, config: GenerateConfig) -> None:
    """Writes chunk files until the time limit."""
    torch.manual_seed(config.seed)
    tokenizer = source.load_tokenizer()
    model = source.load_model(torch.bfloat16, ATTENTION)
    author = Author(config, prompt_source.stream(config.seed), tokenizer, end_of_turn_ids(model))
    writer = ChunkWriter(config)
    cache = SlotCache(model, config.slots, config.max_prompt + config.answer_tokens)
    for token in author.frame.before_user:
        feed(model, cache, torch.full((config.slots,), token))
    running = [author.begin() for _ in range(config.slots)]
    with Clock(config) as clock:
        while clock.has_time_left(writer):
            hidden = feed(model, cache, torch.tensor([s.next_token for s in running]))
            for sequence in running:
                sequence.fed += 1
            asked = [slot for slot, s in enumerate(running) if s.wants_choice]
            if not asked:
                continue
            temperatures = torch.tensor([author.temperature(running[slot]) for slot in asked])
            chosen = choose(model.get_output_embeddings()(hidden[asked]), temperatures, config.top_k)
            for slot in record(author, running, asked, chosen):
                writer.add(running[slot])
                running[slot] = author.begin()
                cache.lengths[slot] = running[slot].fed
    writer.flush()


def record(
    author: Author, running: list[Sequence], asked: list[int], chosen: tuple[Tensor, Tensor, Tensor]
) -> list[int]:
    """Appends the chosen tokens and teacher probabilities; returns the slots of finished sequences."""
    tokens, ids, probs = chosen
    id_rows = ids.numpy().astype(np.uint32)
    prob_rows = probs.numpy().astype(np.float16)
    finished = []
    for row, (slot, token) in enumerate(zip(asked, tokens.tolist(), strict=True)):
        sequence = running[slot]
        sequence.scored.append(sequence.fed - 1)
        sequence.top_ids.append(id_rows[row])
        sequence.top_probs.append(prob_rows[row])
        if not author.extend(sequence, token):
            finished.append(slot)
    return finished


class Clock:
    """Time limit with a progress bar."""

    def __init__(self, config: GenerateConfig) -> None:
        self._end = time.monotonic() + 60 * config.minutes
        columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}"))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("writing", total=60 * config.minutes, rate="")
        self._start = time.monotonic()

    def __enter__(self) -> Clock:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def has_time_left(self, writer: ChunkWriter) -> bool:
        elapsed = time.monotonic() - self._start
        rate = f"{writer.answer_tokens / max(elapsed, 1):.0f} answer tokens/s, {writer.answer_tokens / 1e6:.3f} M"
        self._progress.update(self._task, completed=elapsed, rate=rate)
        return time.monotonic() < self._end


def parse_arguments() -> tuple[argparse.Namespace, GenerateConfig]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="folder for the chunk files")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="templates and fillers")
    parser.add_argument("--excerpts", type=Path, help="fillers written by `excerpts.py`")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="must differ between runs; part of the chunk names")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--slots", type=int, default=192, help="concurrent sequences")
    parser.add_argument("--answer-tokens", type=int, default=128, help="maximum tokens per answer")
    parser.add_argument("--user-tokens", type=int, default=96, help="maximum tokens the target adds to a user turn")
    parser.add_argument("--max-prompt", type=int, default=192, help="maximum prompt tokens")
    parser.add_argument("--greedy-share", type=float, default=0.7, help="share of greedy answers")
    parser.add_argument("--max-temperature", type=float, default=0.6, help="highest temperature of the other answers")
    parser.add_argument("--user-temperature", type=float, default=0.85, help="temperature of user turns")
    parser.add_argument("--top-k", type=int, default=24, help="teacher probabilities kept per position")
    parser.add_argument("--chunk-sequences", type=int, default=256, help="sequences per file")
    arguments = parser.parse_args()
    names = GenerateConfig.__dataclass_fields__
    return arguments, GenerateConfig(**{name: getattr(arguments, name) for name in names})


def main() -> None:
    arguments, config = parse_arguments()
    torch.set_num_threads(arguments.threads)
    source = TargetSource(arguments.target, arguments.gguf_file)
    write_data(source, PromptSource.load(arguments.prompts, arguments.excerpts), config)


if __name__ == "__main__":
    main()
