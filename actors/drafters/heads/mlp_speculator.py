"""MLPSpeculator: a small recurrent network over the target's final state and the tokens sampled after it.

Wertheimer et al. 2024, arXiv 2404.19124; foundation-model-stack/fms-extras, fms_extras/models/speculator.py. Each step
has its own weights, or all steps share weights.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.compute.linear import PlainProjection, Product, Projection, projection
from actors.drafters.heads.files import META, HeadFiles, head_folder, read_head, read_headers
from actors.drafters.heads.last_state import check_state_width, last_state_drafting, states_needed
from actors.drafters.heads.projection import DecodedStates, decoded, draft_columns
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.heads.weight_reader import place
from actors.drafters.registry import DraftSetup
from actors.models.decoder import ForwardOutput
from cluster.config import DraftPool
from cluster.errors import ModelError
from protos.messages import StatesNeeded

__all__ = ["check_head", "create", "states_needed"]  # looked up by the registry

EPS = 1e-6  # epsilon of the norms
ALIASES = ((r"speculator\.", ""),)
COPY = re.compile(r"(emb|proj|head)\.\d+\.weight|ln\.\d+\.(weight|bias)")  # copies that tied steps may store
TIED_KEYS = ("tie_weights", "tie_wts")  # configuration keys of different publishers


@dataclass(frozen=True, slots=True)
class MlpSpeculatorConfig:
    """Sizes and conventions of a speculator."""

    steps: int  # number of predicted tokens
    hidden: int  # width of the target's state
    inner: int
    columns: int  # columns of the published logits
    vocabulary: int  # vocabulary size of the target
    is_tied: bool  # whether steps share weights, apart from the first projection
    scales_input: bool  # whether the target's state is normed first
    needs: StatesNeeded

    @property
    def width(self) -> int:
        return self.steps

    @property
    def recurs(self) -> bool:
        return True

    def reach(self, depth: int) -> int:
        """Returns the number of tokens that the speculator can predict after `depth` tokens.

        It continues from its own states and repeats the last step. A single step reads only target states, so it cannot
        repeat.
        """
        return self.steps if self.steps > 1 else max(0, 1 - depth)

    def weights_of(self, step: int) -> int:
        """Returns the index of a step's stored embedding, norm and LM head."""
        return 0 if self.is_tied else step

    def projection_of(self, step: int) -> int:
        """Returns the index of a step's stored projection. The first step's has other inputs than the rest."""
        return min(step, 1) if self.is_tied else step

    @property
    def state_share(self) -> float:
        """Weight of the previous state per step. After all steps, the squared weight of the target's state is 1/2."""
        return float(0.5 ** (0.5 / self.steps))

    @property
    def token_share(self) -> float:
        """Weight of the sampled token's embedding."""
        return math.sqrt((1 - self.state_share**2) * self.inner / 2)

    def describe(self) -> list[str]:
        """Describes the resolved configuration, one fact per line."""
        weights = "the same weights" if self.is_tied else "separate weights"
        normed = ", normed first" if self.scales_input else ""
        return [
            f"MLPSpeculator of {self.steps} steps with {weights}, {self.inner} wide",
            f"reads the target's state {self.needs.layers[0]}, its final one, {self.needs.width} elements{normed}",
            f"proposes {self.columns} of {self.vocabulary} tokens",
        ]


@dataclass(frozen=True, slots=True, eq=False)
class SpeculatorStep:
    """Weights of one step."""

    embedding: Tensor  # (vocabulary, inner)
    project: Projection
    norm_weight: Tensor  # (inner,)
    norm_bias: Tensor  # (inner,)
    lm_head: Projection


@dataclass(frozen=True, slots=True, eq=False)
class MlpSpeculator:
    """A `LastStateHead` that feeds each step the previous step's state."""

    config: MlpSpeculatorConfig
    steps: Sequence[SpeculatorStep]
    token_ids: Tensor  # (columns,): the target's token id for each logit column

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        """Runs one step from target states, (rows, hidden), at depth 0, or own states, (rows, inner), later."""
        config = self.config
        step = self.steps[min(depth, config.steps - 1)]
        if depth == 0 and config.scales_input:
            states = _normed(states) / math.sqrt(2)
        embedded = F.embedding(torch.tensor(tokens, device=states.device), step.embedding)
        mixed = step.project(states) * config.state_share + embedded * config.token_share
        state = F.gelu(_normed(mixed) * step.norm_weight + step.norm_bias)
        return ForwardOutput(step.lm_head(state), state)


def _normed(x: Tensor) -> Tensor:
    """Applies a root mean square norm, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the speculator in `draft.model` does not match the target."""
    options = draft.mlp_speculator
    return decoded(last_state_drafting(load_mlp_speculator, draft, setup, options), setup)


def check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None:
    """Runs the head's loader on headers alone. Raises ModelError if the head does not match the target."""
    files = read_headers(head_folder(draft)).renamed(ALIASES)
    config = resolve_mlp_speculator(files, target_shape(target))
    mlp_speculator_of(files, config, torch.float32, META, tokens, PlainProjection)


def load_mlp_speculator(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> MlpSpeculator:
    """Loads a published speculator. Raises ModelError if it does not match the target."""
    files = read_head(folder).renamed(ALIASES)
    config = resolve_mlp_speculator(files, target_shape(target_folder))
    return mlp_speculator_of(files, config, dtype, device, proposable, product)


def mlp_speculator_of(
    files: HeadFiles,
    config: MlpSpeculatorConfig,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product,
) -> MlpSpeculator:
    """Builds a speculator from tensor names without prefix.

    Raises ModelError if it does not match the target or contains unused tensors.
    """
    used: set[str] = set()
    if config.columns <= max(proposable):
        raise ModelError(
            f"{files.folder} has embeddings for {config.columns} tokens, but the target's ids go up to"
            f" {max(proposable)}; use a speculator made for this target"
        )
    columns = draft_columns(files.folder, torch.arange(config.columns), config.vocabulary, proposable)

    def placed(name: str, *shape: int) -> Tensor:
        used.add(name)
        return place(files.folder, name, files.tensor(name, shape), dtype, device)

    @cache  # steps may share weights
    def embedding(one: int) -> Tensor:
        return placed(f"emb.{one}.weight", config.columns, config.inner)

    @cache
    def lm_head(one: int) -> Projection:
        return product(columns.of(placed(f"head.{one}.weight", config.columns, config.inner)), None)

    def step(index: int) -> SpeculatorStep:
        inputs = config.hidden if index == 0 else config.inner
        one = config.weights_of(index)
        return SpeculatorStep(
            embedding=embedding(one),
            project=product(placed(f"proj.{config.projection_of(index)}.weight", config.inner, inputs), None),
            norm_weight=placed(f"ln.{one}.weight", config.inner),
            norm_bias=placed(f"ln.{one}.bias", config.inner),
            lm_head=lm_head(one),
        )

    steps = [step(index) for index in range(config.steps)]
    copied = COPY.fullmatch if config.is_tied else used.__contains__
    if unused := [name for name in sorted(files.tensors) if name not in used and not copied(name)]:
        files.refuse_unused(unused, "MLPSpeculator")
    return MlpSpeculator(config, steps, columns.token_ids.to(device))


def resolve_mlp_speculator(files: HeadFiles, target: TargetShape) -> MlpSpeculatorConfig:
    """Resolves a speculator from tensor names without prefix. Raises ModelError if it does not match the target."""
    files.refuse_quantized()
    if "emb.0.weight" not in files.tensors:
        raise ModelError(
            f"{files.folder} holds no MLPSpeculator: there is neither emb.0.weight nor speculator.emb.0.weight"
        )
    columns, inner = map(int, files.tensors["emb.0.weight"].shape)
    hidden = int(files.tensor("proj.0.weight").shape[-1])
    stored = sum(name.startswith("emb.") and name.endswith(".weight") for name in files.tensors)
    is_tied = any(bool(files.config.get(key)) for key in TIED_KEYS)
    steps = files.config.get("n_predict", stored)
    if not isinstance(steps, int) or steps < 1 or (not is_tied and stored != steps):
        raise ModelError(
            f"{files.folder} has n_predict {steps!r} and {stored} embeddings, expected 1 or more, and as many"
            " embeddings unless tie_weights is true"
        )
    check_state_width(files.folder, hidden, target)
    if columns > target.vocabulary:
        raise ModelError(f"{files.folder} has {columns} tokens, expected at most {target.vocabulary}, the target's")
    return MlpSpeculatorConfig(
        steps=steps,
        hidden=hidden,
        inner=inner,
        columns=columns,
        vocabulary=target.vocabulary,
        is_tied=is_tied,
        scales_input=bool(files.config.get("scale_input")),
        needs=StatesNeeded((target.layers,), hidden),
    )
