"""An EAGLE-3 head that knows a few answers of the demo's target by heart: it is right about them, from states alone.

A head of random weights is hardly ever right, and then acceptance shows nothing. Learning a few answers takes a minute.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from actors.drafters.heads.eagle.config import default_states
from actors.models.checkpoint import load_model
from examples.train_head.answers import chat_ids, written
from examples.train_head.heads.target_parts import target_parts
from examples.train_head.options import HeadOptions, Running, Schedule
from examples.train_head.sampling_order import HELD_OUT_EVERY
from examples.train_head.shards import Shards, StatesDescription
from examples.train_head.states import store_states
from examples.train_head.token_files import TokenIds, common_opening
from examples.train_head.trainer import LATEST, Training

CPU = torch.device("cpu")
DRAFT_VOCABULARY = 1024
UNROLL = 2
STEPS = 60


def fitted_head(target: Path, prompts: tuple[str, ...], answer: int, scratch: Path) -> Path:
    """Learns the greedy answers to single turns, of so many tokens whatever ends them; the folder is SafeAILab's."""
    shards = stored_answers(target, prompts, answer, scratch / "states")
    options = HeadOptions(unroll=UNROLL, draft_vocabulary=DRAFT_VOCABULARY)
    return trained(target, shards, options, Schedule(STEPS, batch=len(prompts), warmup=5), scratch / "head")


def stored_answers(target: Path, prompts: tuple[str, ...], answer: int, folder: Path) -> Shards:
    """The states of the greedy answers to single turns, each once in the folder, and often enough for a training."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    turns = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    model = load_model(target, "float32", CPU)
    alone = [written(model, [turn], [0.0], answer, (), 1, torch.Generator()) for turn in turns]
    shards = _stored(model, target, [np.array(text, dtype=np.int64) for (text,) in alone], folder)
    # The trainer leaves out one sequence of so many, and measures what it has learned on it.
    shards.sequences *= -(-HELD_OUT_EVERY // len(prompts))
    return shards


def trained(target: Path, shards: Shards, options: HeadOptions, schedule: Schedule, folder: Path) -> Path:
    """A head of any kind, in the layout of its kind."""
    running = Running(save_every=schedule.steps, held_out=1, dtype="float32")
    Training(folder, target_parts(str(target)), shards, options, schedule, running).run()
    return folder / LATEST


def _stored(model: PreTrainedModel, target: Path, texts: list[TokenIds], folder: Path) -> Shards:
    config = model.config.get_text_config()
    layers = default_states(config.num_hidden_layers)
    StatesDescription(
        target=str(target),
        layers=layers,
        hidden=config.hidden_size,
        dtype="float32",
        opening=common_opening(texts),
        sequences=len(texts),
        positions=sum(map(len, texts)),
        token_counts=tuple(np.bincount(np.concatenate(texts), minlength=config.vocab_size).tolist()),
        per_shard=len(texts),
    ).write(folder)
    store_states(model, texts, layers, folder, len(texts), 1)
    return Shards(folder)
