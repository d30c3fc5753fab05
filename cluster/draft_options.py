"""The options of drafting methods: a section of `draft` each, and which methods take which."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DraftModelOptions(_Options):
    """Of the methods that ask a draft model."""

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
    """Of the methods that look the continuation up in the text: prompt_lookup and lookup_first."""

    max_ngram: Positive = Field(4, description="longest suffix of the text that is searched for")
    min_ngram: Positive = Field(2, description="shortest suffix of the text that is searched for")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class LayerSkipOptions(_Options):
    """Of layer_skip, which drafts with some of the target's layers."""

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
        """Of the layers, from 0."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class SuffixOptions(_Options):
    """Of suffix, which looks the continuation up in the text and in answers that have ended."""

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


class HeadOptions(_Options):
    """Of a method that drafts with a published head, which reads the target's hidden states."""

    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="entries of draft_probs per token, for ratio")
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: the head's matrix products in 8 bits, on CPUs; only what is proposed changes, never an"
        " answer",
    )


class StatesOptions(_Options):
    """How the target's hidden states travel, for methods that read them."""

    project: Literal["target", "drafter"] = Field(
        "target",
        description="where they go through the projection that the method begins with, if it has one: at the target,"
        " they travel in one hidden size a token instead of one a layer. No method of this release has one",
    )
    dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16", description="of what is kept and sent; float8 takes half of the bytes, with one scale a token"
    )


SECTIONS_TAKEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "draft_model": frozenset({"draft_model"}),
        "prompt_lookup": frozenset({"prompt_lookup"}),
        "lookup_first": frozenset({"draft_model", "prompt_lookup"}),
        "layer_skip": frozenset({"draft_model", "layer_skip"}),
        "suffix": frozenset({"suffix"}),
        "medusa": frozenset({"medusa"}),
        "mlp_speculator": frozenset({"mlp_speculator"}),
        "dflash": frozenset({"dflash"}),
        "eagle": frozenset({"eagle"}),
        "mtp": frozenset({"mtp"}),
    }
)
"""By method: the sections whose options it has a use for."""

HEADS = frozenset({"medusa", "mlp_speculator", "dflash", "eagle"})
"""The methods whose checkpoint is a head, which reads the target's hidden states and has no tokenizer."""

STATE_READERS = HEADS | {"mtp"}
"""The methods that read the target's hidden states; an MTP module lies in the target's own checkpoint."""

TAKING_MODELS = frozenset({"draft_model", "lookup_first"}) | HEADS
"""The methods that load a checkpoint of their own."""
