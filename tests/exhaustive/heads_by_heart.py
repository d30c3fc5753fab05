"""Small heads in every published layout that have memorized a few answers of the demo's target.

Each head is created on first use. EAGLE-3, Medusa, MLPSpeculator and DFlash heads are trained with the example scripts.
The P-EAGLE head is the EAGLE-3 head with a random mask, so only its first token is right. The EAGLE-1 head is a single
matrix, fitted by least squares; its decoder layer outputs zero.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from actors.drafters.heads.eagle.config import default_states
from actors.models.checkpoint import load_model
from examples.train_head.answers import chat_ids, written
from examples.train_head.heads.target_parts import TargetParts, target_parts
from examples.train_head.options import HeadKind, HeadOptions, Running, Schedule
from examples.train_head.sampling_order import HELD_OUT_EVERY
from examples.train_head.shards import Shards, StatesDescription
from examples.train_head.states import store_states
from examples.train_head.token_files import TokenIds, common_opening
from examples.train_head.trainer import LATEST, Training

CPU = torch.device("cpu")
DRAFT_VOCABULARY = 1024
WARMUP = 5  # steps
RIDGE = 1e-3  # relative to the mean square of the inputs, which arrive rounded
NARROW = 64  # width of the layer that outputs zero


class MemorizedHeads:
    """Heads fitted to a target's greedy answers to some prompts, up to a token limit."""

    def __init__(self, target: Path, prompts: tuple[str, ...], answer: int, scratch: Path) -> None:
        self._target = target
        self._prompts = prompts
        self._answer = answer
        self._scratch = scratch
        self._made: dict[str, Path] = {}
        train = self._trained
        self._factories: Mapping[str, Callable[[], Path]] = {
            "eagle3": partial(train, HeadOptions(HeadKind.EAGLE, 2, draft_vocabulary=DRAFT_VOCABULARY), 60),
            "medusa": partial(train, HeadOptions(HeadKind.MEDUSA, 4, draft_vocabulary=DRAFT_VOCABULARY), 80),
            # Embeddings and LM heads are large: few steps with a higher learning rate.
            "mlp_speculator": partial(
                train, HeadOptions(HeadKind.MLP_SPECULATOR, 2), 40, scored_share=0.5, learning_rate=3e-3
            ),
            "dflash": partial(train, HeadOptions(HeadKind.DFLASH, 4, draft_vocabulary=DRAFT_VOCABULARY), 80),
            "eagle1": self._fitted_eagle1,
            "p_eagle": self._masked_eagle3,
        }

    def folder(self, layout: str) -> Path:
        if layout not in self._made:
            self._made[layout] = self._factories[layout]()
        return self._made[layout]

    @cached_property
    def _shards(self) -> Shards:
        return stored_answers(self._target, self._prompts, self._answer, self._scratch / "states")

    @cached_property
    def _parts(self) -> TargetParts:
        return target_parts(str(self._target))

    def _trained(self, options: HeadOptions, steps: int, **more: float) -> Path:
        schedule = Schedule(steps, batch=len(self._prompts), warmup=WARMUP, **more)
        return trained(self._target, self._shards, options, schedule, self._scratch / options.kind.value)

    def _masked_eagle3(self) -> Path:
        source = self.folder("eagle3")
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        mask = torch.randn(1, tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(1))
        return _written(self._scratch / "p_eagle", config | {"mask_token_id": 0}, tensors | {"mask_hidden": mask})

    def _fitted_eagle1(self) -> Path:
        """Fits the map from a token's embedding and the final state before it to the final state after it."""
        sizes = self._parts.sizes
        batch = self._shards.batch(self._shards.sequences[: len(self._prompts)], CPU)
        embedding = self._parts.embedding()
        read = [
            torch.cat([embedding[batch.tokens[row, 1:end]], batch.final[row, : end - 1]], -1)
            for row, end in _rows(batch.lengths)
        ]
        made = [batch.final[row, 1:end] for row, end in _rows(batch.lengths)]
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": sizes.hidden,
            "intermediate_size": NARROW,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": NARROW,
            "vocab_size": sizes.vocabulary,
            "max_position_embeddings": sizes.max_positions,
            "rms_norm_eps": sizes.eps,
            "rope_theta": 10000.0,
            "bias": False,
        }
        tensors = {"fc.weight": _least_squares(torch.cat(read), torch.cat(made)), **_idle_layer(sizes.hidden)}
        return _written(self._scratch / "eagle1", config, tensors)


def _rows(lengths: Tensor) -> list[tuple[int, int]]:
    return list(enumerate(lengths.tolist()))


def _least_squares(read: Tensor, made: Tensor) -> Tensor:
    """Returns the matrix that maps inputs, (n, inputs), to outputs, (n, outputs), with the least squared error."""
    wide = read.double()
    # With fewer rows than inputs, the dual system is smaller.
    among = wide @ wide.T
    ridge = RIDGE * among.diagonal().mean() * torch.eye(len(wide), dtype=torch.float64)
    return (wide.T @ torch.linalg.solve(among + ridge, made.double())).T.float().contiguous()


def _idle_layer(hidden: int) -> dict[str, Tensor]:
    """Returns a decoder layer whose attention and MLP output zeros."""
    found = {f"self_attn.{name}_proj.weight": torch.zeros(NARROW, hidden) for name in "qkv"}
    found |= {f"mlp.{name}_proj.weight": torch.zeros(NARROW, hidden) for name in ("gate", "up")}
    found |= {f"{name}_proj.weight": torch.zeros(hidden, NARROW) for name in ("self_attn.o", "mlp.down")}
    found["post_attention_layernorm.weight"] = torch.ones(hidden)
    return {f"layers.0.{name}": tensor for name, tensor in found.items()}


def _written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored_answers(target: Path, prompts: tuple[str, ...], answer: int, folder: Path) -> Shards:
    """Stores the states of greedy answers to single-turn prompts, repeated often enough for training."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    turns = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    model = load_model(target, "float32", CPU)
    alone = [written(model, [turn], [0.0], answer, (), 1, torch.Generator()) for turn in turns]
    shards = _stored(model, target, [np.array(text, dtype=np.int64) for (text,) in alone], folder)
    # The trainer holds out one sequence in HELD_OUT_EVERY and measures agreement on it.
    shards.sequences *= -(-HELD_OUT_EVERY // len(prompts))
    return shards


def trained(target: Path, shards: Shards, options: HeadOptions, schedule: Schedule, folder: Path) -> Path:
    """Trains a head of any kind and returns its folder, in the layout of its kind."""
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
