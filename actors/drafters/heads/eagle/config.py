"""Configuration of an EAGLE head, resolved from its files and the target's shape into one printable value.

EAGLE: Li et al. 2024, arXiv 2401.15077; EAGLE-2: arXiv 2406.16858; EAGLE-3: Li et al. 2025, arXiv 2503.01840.
"""

from dataclasses import dataclass
from enum import Enum

from actors.drafters.heads.eagle.layer_ids import LayerIdMeaning
from actors.drafters.heads.rope import Rope
from cluster.draft_options import EagleOptions
from protos.states import StatesNeeded


class EagleKind(Enum):
    """Input of a head's first layer."""

    EAGLE = "EAGLE-1/2"  # a projection of the embedding and the target's final state
    EAGLE3 = "EAGLE-3"  # embedding and state, concatenated
    MTP = "multi-token prediction"  # as EAGLE-1, with embedding and state normed separately


class FeatureNorm(Enum):
    """Norm before the projection of the target's states."""

    NOTHING = "nothing"
    ALL = "all states as one row"  # input_norm, by norm_before_fc
    EACH = "each state by itself"  # fc_norm


class OutputNorm(Enum):
    """Uses of the norm after the last layer."""

    NOTHING = "nothing"
    LOGITS = "logits"  # recycled states are taken before the norm
    BOTH = "logits and recycled states"  # norm_output: EAGLE 3.1


class WeightSource(Enum):
    """Source of the embedding or the LM head."""

    HEAD = "the head"
    EMBEDDING = "the head's embedding"
    TARGET = "the target"


@dataclass(frozen=True, slots=True)
class EagleOverrides:
    """User settings that override the head's configuration; None keeps the configured value."""

    states: tuple[int, ...] | None = None  # states of the target to read
    layer_ids: LayerIdMeaning | None = None
    output_norm: OutputNorm | None = None  # SpecForge's norm_output meant something else before September 2026
    max_positions: int | None = None  # published configurations often say 2048, whatever the head was trained for


def overrides_of(options: EagleOptions) -> EagleOverrides:
    """Reads the overrides from the method's options."""
    meaning = options.layer_ids
    norm = options.output_norm
    return EagleOverrides(
        states=options.states,
        layer_ids=None if meaning is None else LayerIdMeaning(meaning),
        output_norm=None if norm is None else OutputNorm[norm.upper()],
        max_positions=options.max_positions,
    )


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and conventions of a head."""

    kind: EagleKind
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of the norms
    rope: Rope
    max_positions: int
    vocabulary: int  # the target's
    columns: int  # of the logits: the draft vocabulary
    target_hidden: int
    needs: StatesNeeded
    projects: bool  # EAGLE-3: whether `fc` projects the target's states before they are fed
    feature_norm: FeatureNorm
    norm_before_residual: bool
    output_norm: OutputNorm
    embedding: WeightSource
    lm_head: WeightSource
    mask_token: int | None  # of a head that predicts several tokens in one forward (P-EAGLE)
    hides_first: bool = False  # the embedding at position 0 is zero

    def describe(self) -> list[str]:
        """Describes how the head was understood, one fact per line."""
        first = f"{self.kind.value} head: {self.layers} layer(s) of {self.hidden}, MLP {self.intermediate}"
        lines = [
            f"{first}, {self.heads} heads, {self.kv_heads} key-value heads of {self.head_dim}, eps {self.eps:g}",
            f"reads the target's states {list(self.needs.layers)} (k: after k layers), {self.needs.width} elements",
            f"positions up to {self.max_positions}, {self.rope}",
            f"proposes {self.columns} of {self.vocabulary} tokens",
            f"embedding of {self.embedding.value}, LM head of {self.lm_head.value}",
            f"norm after the last layer: {self.output_norm.value}",
        ]
        if self.kind is EagleKind.EAGLE3:
            residual = "normed" if self.norm_before_residual else "as they come"
            lines.append(f"norm before fc: {self.feature_norm.value}; states enter the residual {residual}")
        if self.mask_token is not None:
            lines.append(f"predicts several tokens in one forward, by mask token {self.mask_token}")
        return lines
