"""Options of drafting methods, one section of `draft` each, and the sections that each method uses."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.errors import ModelError
from protos.states import StatesNeeded

Positive = Annotated[int, Field(gt=0)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DraftModelOptions(_Options):
    """Options of the methods that run a draft model."""

    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: the draft model's matrix products in 8 bits, on CPUs; about twice as fast, and only what is"
        " proposed changes, never an answer",
    )
    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="a block that is waited for ends once its chance to be accepted so far is below; not under ratio",
    )
    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="entries of draft_probs per token, for ratio")


class PromptLookupOptions(_Options):
    """Options of the methods that search the text for its continuation: prompt_lookup and lookup_first."""

    max_ngram: Positive = Field(4, description="longest suffix of the text that is searched for")
    min_ngram: Positive = Field(2, description="shortest suffix of the text that is searched for")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class LayerSkipOptions(_Options):
    """Options of layer_skip, which drafts with some of the target's layers."""

    layers: Positive | tuple[int, ...] = Field(
        4, description="the target's first so many layers, or the ids of its layers, from 0 and rising"
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if isinstance(self.layers, int):
            return self
        if not self.layers or self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers are {list(self.layers)}, expected at least one id, from 0, each higher than the last"
            )
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """Layer ids, from 0."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class SuffixOptions(_Options):
    """Options of suffix, which searches the text and ended answers for the continuation."""

    max_ngram: Positive = Field(16, description="most tokens of the text's end that are compared")
    min_ngram: Positive = Field(2, description="fewest tokens of the text's end that must be alike")
    remembered_tokens: int = Field(
        1 << 17, ge=0, description="of recent answers, some 200 bytes each; 0: a text is looked up in itself alone"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class LookupFirstOptions(_Options):
    """Options of lookup_first; those of the method that it asks when unsure are in that method's section."""

    then: Literal["draft_model", "medusa", "mlp_speculator", "dflash", "eagle", "mtp"] = Field(
        "draft_model", description="method that is asked in doubt, with draft.model as its checkpoint, if it has one"
    )


class HeadOptions(_Options):
    """Options of a method that drafts with a published head, which reads the target's hidden states."""

    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="entries of draft_probs per token, for ratio")
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: the head's matrix products in 8 bits, on CPUs; only what is proposed changes, never an"
        " answer",
    )


class EagleOptions(HeadOptions):
    """Options of eagle.

    All but the inherited ones override the published head's configuration; by default the head's apply.
    """

    states: tuple[int, ...] | None = Field(
        None,
        description="which of the target's states an EAGLE-3 head reads side by side, rising: k is the stream after k"
        " layers",
    )
    layer_ids: Literal["state", "output"] | None = Field(
        None,
        description="what a layer id k in an EAGLE-3 head's configuration means: state k, or the output of layer k,"
        " which is state k + 1; a wrong one costs most of the acceptance",
    )
    output_norm: Literal["nothing", "logits", "both"] | None = Field(
        None,
        description="what the norm after the head's last layer is for: the logits, or the states that it goes on from"
        " too; overrides norm_output, which SpecForge's files of before September 2026 mean otherwise",
    )
    max_positions: Positive | None = Field(
        None, description="positions that the head takes; published ones often say 2048, whatever they were trained for"
    )

    @field_validator("states")
    @classmethod
    def _rising(cls, states: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if states is not None and (not states or states[0] < 0 or list(states) != sorted(set(states))):
            raise ValueError(f"states are {list(states)}, expected at least one, from 0, each higher than the last")
        return states


class StatesOptions(_Options):
    """Transport of the target's hidden states to methods that read them."""

    project: Literal["auto", "target", "drafter"] = Field(
        "auto",
        description="where they go through the projection that an EAGLE-3 or DFlash head begins with: at the target,"
        " they are kept and travel in one hidden size a token instead of one a layer, and drafts are the same. auto: at"
        " the target, if the head has a projection and it makes them narrower; target is refused for heads without one",
    )
    dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16", description="of what is kept and sent; float8 takes half of the bytes, with one scale a token"
    )

    keep: bool = Field(
        True,
        description="whether the target keeps them beside its KV cache, for as long. Where it does not, they take no"
        " memory there, and for a new drafter and for what was found in the cache they are computed again: for medusa"
        " and mlp_speculator of the last token, for eagle, dflash and mtp of the last `window` ones",
    )

    window: Positive = Field(
        512,
        description="without keep: of how many of a text's last tokens eagle, dflash and mtp read states where those of"
        " earlier ones would be computed again. They take the text to begin there: fewer cost less at the target, and"
        " some acceptance",
    )

    kept_tokens: Positive | None = Field(
        None,
        description="whose states a drafter keeps, of all sessions together. At this bound it takes no session whose"
        " text has no room, and gives one up that grows beyond it; the router looks for another drafter. default: as"
        " many as draft.max_sessions of model.max_context have",
    )

    def projects_at_target(self, needed: StatesNeeded) -> bool:
        """Returns True if the target applies the method's projection.

        Raises ModelError if `project` is `target` and the head has no projection.
        """
        narrowed = needed.projected_width
        if self.project == "target" and narrowed is None:
            raise ModelError(
                "draft.states.project is target, but the head that draft.model names begins with no projection of the"
                " target's states alone; set it to auto or drafter"
            )
        if self.project == "auto":
            return narrowed is not None and narrowed < needed.width
        return self.project == "target"


SECTIONS_TAKEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "draft_model": frozenset({"draft_model"}),
        "prompt_lookup": frozenset({"prompt_lookup"}),
        "lookup_first": frozenset({"lookup_first", "prompt_lookup"}),
        "layer_skip": frozenset({"draft_model", "layer_skip"}),
        "suffix": frozenset({"suffix"}),
        "medusa": frozenset({"medusa"}),
        "mlp_speculator": frozenset({"mlp_speculator"}),
        "dflash": frozenset({"dflash"}),
        "eagle": frozenset({"eagle"}),
        "mtp": frozenset({"mtp"}),
    }
)
"""Sections that each method uses; lookup_first also uses those of the method that it asks."""

HEADS = frozenset({"medusa", "mlp_speculator", "dflash", "eagle"})
"""Methods whose checkpoint is a head, which reads the target's hidden states and has no tokenizer."""

STATE_READERS = HEADS | {"mtp"}
"""Methods that read the target's hidden states; an MTP module is part of the target's own checkpoint."""

PROJECTING_HEADS = frozenset({"dflash", "eagle"})
"""Heads that may begin with a projection of the states alone; the checkpoint shows whether one does."""

TAKING_MODELS = frozenset({"draft_model"}) | HEADS
"""Methods that load a checkpoint of their own; lookup_first does if the method that it asks does."""
