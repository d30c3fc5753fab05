"""Fields of requests that say which tokens may come, when an answer ends, and what is told of its tokens."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from protos.from_pb import MAX_BIAS, MAX_SALT_CHARS, REPETITION_PENALTIES
from protos.scores import MAX_TOP
from serve_app.http.wire.field_types import Flag, Integer, Number, RequestPart, bounded

MAX_WORD_CHARS = 256
MAX_DIGITS = 10  # of a token id

TokenId = Annotated[Integer, Field(ge=0, lt=2**31)]
Top = Annotated[Integer, Field(ge=0, le=MAX_TOP)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Bias = Annotated[Number, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


def _as_ids(value: Any) -> Any:
    """JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS for key in value):
        raise PydanticCustomError("token_id", "a key is not a token id, expected digits alone")
    return {int(key): bias for key, bias in value.items()}


class SamplingFields(RequestPart):
    """Of both endpoints; most are vLLM's."""

    repetition_penalty: Annotated[Number, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] = 1.0
    logit_bias: Annotated[dict[TokenId, Bias], bounded(lambda most: most.token_ids)] = Field(default_factory=dict)
    bad_words: Annotated[tuple[Word, ...], Field(fail_fast=True), bounded(lambda most: most.words)] = ()
    allowed_token_ids: Annotated[
        tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.allowed, least=1)
    ] = ()
    min_tokens: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.token_ids)] = ()
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = None  # -1: as many as there is room for
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: Top | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] = 0  # lower numbers first
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        return _as_ids(value)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("no_tokens", "this is 0, expected -1, or at least 1")
        return value
