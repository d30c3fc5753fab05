"""Request field types: strict values, bounded lists, inert and unsupported fields, grammars.

List lengths are checked before elements are validated, and validation stops at the first invalid element. Validation
time is therefore proportional to the body's size, and error reports stay short. Parsing is pure and runs on a worker
thread.

OpenAI and vLLM clients send fields that have no effect here. Inert fields (user names, storage, billing) accept any
value of their type. Fields of unsupported features accept only values that leave the feature off. Other values raise an
error that names the field, since an answer without the feature would be wrong.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema, from_json

from cluster.config import plain_message
from cluster.errors import INVALID_VALUE, RequestError


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Maximum number of items in each list of a request."""

    prompts: int = 128
    prompt_tokens: int = 1 << 20  # tokens per prompt
    messages: int = 4096
    parts: int = 256  # parts per message
    tools: int = 128
    variables: int = 64  # variables passed to a chat template
    stops: int = 4096
    words: int = 1024  # items of `bad_words`
    token_ids: int = 4096  # items of `logit_bias` or `stop_token_ids`
    allowed: int = 1 << 18  # items of `allowed_token_ids`
    choices: int = 4096  # choices of `structured_outputs.choice`
    labels: int = 16  # entries of `metadata`
    containers: int = 1 << 15  # lists and objects in a whole body
    members: int = 1 << 16  # fields of all objects in a whole body
    strings: int = 160_000  # strings in a whole body


MAX_FAULTS = 10  # maximum number of errors per report
NULL = {"type": "null"}

Integer = Annotated[int, Field(strict=True)]  # rejects 1.0, "1" and true
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[Integer, Field(ge=-(2**63), lt=2**64)]  # 64 bits, signed or unsigned
Count = Annotated[Integer, Field(ge=1, lt=2**63)]


class RequestPart(BaseModel):
    """Base class of request objects. Unknown fields are errors; null means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Drops nulls and all but a few unknown fields, whose values become the nearest known names.

        The error message names only those fields.
        """
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        values = {name: data[name] for name in names if data.get(name) is not None}
        unknown = islice((name for name in data if name not in names), MAX_FAULTS)
        return values | {name: _nearest(name, names) for name in unknown}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler.resolve_ref_schema(handler(core))
        fields = described.get("properties", {})
        for name in fields.keys() - set(described.get("required", ())):
            fields[name] = _nullable(fields[name])
        return described


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that a field may have been meant to be."""
    return next(iter(get_close_matches(name, known, n=1)), None) if len(name) <= MAX_NAME_CHARS else None


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an optional field, which also accepts null."""
    if None in field.get("enum", ()):
        return field
    own = {name: value for name, value in field.items() if name in ("title", "default", "description")}
    accepted = {name: value for name, value in field.items() if name not in own}
    kinds = accepted["anyOf"] if accepted.keys() == {"anyOf"} else [accepted]
    return own | {"anyOf": [*kinds, *([] if NULL in kinds else [NULL])]}


@dataclass(frozen=True, slots=True, eq=False)  # no equality: Annotated would merge annotations of True and 1
class Unserved:
    """Annotation for fields of unsupported features; accepts only the `passing` values."""

    passing: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"enum": [None, *self.passing]}

    def _check(self, value: object) -> object:
        if not any(isinstance(value, bool) is isinstance(other, bool) and value == other for other in self.passing):
            raise PydanticCustomError("unserved", "this is not supported by this server; leave the field out")
        return value


def unserved(*neutral: object) -> Unserved:
    """Declares a field of an unsupported feature; accepts only null and values that leave the feature off."""
    return Unserved(neutral)


def bounded(most: Callable[[RequestBounds], int], least: int = 0) -> BeforeValidator:
    """Declares a list or object whose length is checked before its items."""

    def check(value: Any, info: ValidationInfo) -> Any:
        limit = most(info.context or RequestBounds())
        if isinstance(value, list | dict) and not least <= len(value) <= limit:
            counts = {"count": len(value), "least": least, "limit": limit}
            raise PydanticCustomError("length", "this has {count} items, expected {least} to {limit}", counts)
        return value

    return BeforeValidator(check)


def as_list(is_single: Callable[[Any], bool], accepted: Any) -> BeforeValidator:
    """Declares a list field that also accepts a single item; `accepted` is the type of both forms."""
    return BeforeValidator(lambda value: [value] if is_single(value) else value, json_schema_input_type=accepted)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


MAX_FAULT_CHARS = 200
MAX_NAME_CHARS = 64
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unserved": "unsupported_value",
}

RequestT = TypeVar("RequestT", bound=RequestPart)


def parse(schema: type[RequestT], body: bytes, bounds: RequestBounds) -> RequestT:
    """Parses a JSON body into a request of type `schema`."""
    _check_structure(body, bounds)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {shortened(str(error))}", code="invalid_json") from error
    return check(schema, data, bounds)


def check(schema: type[RequestT], data: object, bounds: RequestBounds) -> RequestT:
    """Validates parsed JSON as a request of type `schema`."""
    try:
        return schema.model_validate(data, context=bounds)
    except ValidationError as error:
        raise _refusal(error) from error


def shortened(text: str, most: int = MAX_FAULT_CHARS) -> str:
    """Truncates text for an error message."""
    return text if len(text) <= most else f"{text[:most]}..."


def _check_structure(body: bytes, most: RequestBounds) -> None:
    """Raises RequestError if a body has too many objects, fields or strings, counted before parsing.

    Parsing is far more expensive: two brackets become an object of a hundred bytes, and an object field costs ten times
    as much as a list item.
    """
    if _containers(body) <= most.containers and _members(body) <= most.members:
        return  # within bounds, even counting characters inside strings
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(unescaped.count(b'"') // 2, most.strings, "strings")
    without_text = b"".join(unescaped.split(b'"')[::2])
    _check_count(_containers(without_text), most.containers, "lists and objects")
    _check_count(_members(without_text), most.members, "fields")


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _members(body: bytes) -> int:
    return body.count(b":")


def _check_count(count: int, most: int, subject: str) -> None:
    if count > most:
        raise RequestError(f"the body has more than {most} {subject}, this server's limit; send a smaller body")


def _refusal(error: ValidationError) -> RequestError:
    faults = error.errors(include_url=False)
    reported = [(_path(fault["loc"]), shortened(_message(fault))) for fault in faults[:MAX_FAULTS]]
    message = "; ".join(f"{path or 'body'}: {fault}" for path, fault in reported)
    unreported = len(faults) - len(reported)
    return RequestError(
        f"{message}; and {unreported} more" if unreported else message, reported[0][0] or None, _code(faults[0])
    )


def _message(fault: ErrorDetails) -> str:
    if fault["type"] != "extra_forbidden":
        return plain_message(fault, "field", "an object")
    nearest = fault["input"]  # see RequestPart
    return f"unknown field; {'leave it out' if nearest is None else f'did you mean {nearest}?'}"


def _code(fault: ErrorDetails) -> str:
    """Returns OpenAI's error code for a validation error."""
    kind = fault["type"]
    return CODES.get(kind, "invalid_type" if kind.endswith("_type") else INVALID_VALUE)


MEMBER = "\0"  # begins the tags of union members, which pydantic adds to the locations of errors


def member(name: str) -> str:
    """Returns the tag of a union's member, which no error names."""
    return f"{MEMBER}{name}"


def _path(location: tuple[int | str, ...]) -> str:
    """Formats `("messages", 0, "content")` as `messages[0].content`."""
    steps = [part for part in location if isinstance(part, int) or not part.startswith(MEMBER)]
    return "".join(map(_step, steps)).removeprefix(".")


def _step(part: Any) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{shortened(part, MAX_NAME_CHARS)}"


class UnservedFields(RequestPart):
    """Inert and unsupported fields of completions and chats."""

    user: str | None = None
    session_id: str | None = None

    add_special_tokens: Annotated[Any, unserved()] = None
    ec_transfer_params: Annotated[Any, unserved()] = None
    kv_transfer_params: Annotated[Any, unserved()] = None
    length_penalty: Annotated[Any, unserved(1)] = None
    logprob_token_ids: Annotated[Any, unserved()] = None
    repetition_detection: Annotated[Any, unserved()] = None
    return_mm_kwargs: Annotated[Any, unserved(True)] = None
    return_token_ids: Annotated[Any, unserved(False)] = None
    return_token_offsets: Annotated[Any, unserved(False)] = None
    return_tokens_as_token_ids: Annotated[Any, unserved(False)] = None
    routed_experts_prompt_start: Annotated[Any, unserved(0)] = None
    stream_interval: Annotated[Any, unserved(1)] = None
    thinking_token_budget: Annotated[Any, unserved(-1)] = None
    use_beam_search: Annotated[Any, unserved(False)] = None
    vllm_xargs: Annotated[Any, unserved({})] = None
    watermarking: Annotated[Any, unserved(False)] = None


class UnservedCompletionFields(UnservedFields):
    """Inert and unsupported fields of completions only."""

    add_special_tokens: Annotated[Any, unserved(True)] = None
    best_of: Annotated[Any, unserved(1)] = None
    prompt_embeds: Annotated[Any, unserved()] = None
    suffix: Annotated[Any, unserved("")] = None


class UnservedChatFields(UnservedFields):
    """Inert and unsupported fields of chat completions only."""

    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Flag | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    add_special_tokens: Annotated[Any, unserved(False)] = None
    audio: Annotated[Any, unserved()] = None
    chat_template: Annotated[Any, unserved()] = None
    documents: Annotated[Any, unserved([])] = None
    echo: Annotated[Any, unserved(False)] = None
    function_call: Annotated[Any, unserved("none")] = None
    functions: Annotated[Any, unserved([])] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None
    modalities: Annotated[Any, unserved(["text"])] = None
    moderation: Annotated[Any, unserved()] = None
    prediction: Annotated[Any, unserved()] = None
    return_prompt_text: Annotated[Any, unserved(False)] = None
    web_search_options: Annotated[Any, unserved()] = None


class UnservedMessageFields(RequestPart):
    """Inert and unsupported fields of chat messages; clients send answer messages back unchanged."""

    name: str | None = None
    parsed: Any = None  # ignored; OpenAI's client sends back its parsed value

    annotations: Annotated[Any, unserved([])] = None
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved()] = None
    refusal: Annotated[Any, unserved()] = None


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def _schema(value: Any) -> Any:
    """Parses a JSON schema given as an object or, as in vLLM, as text."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        raise PydanticCustomError("json_text", "this is not JSON: {why}", {"why": str(error)}) from error


FormatName = Annotated[str, Field(pattern=rf"^[\w-]{{1,{MAX_NAME_CHARS}}}$")]
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_schema)]


class JsonSchemaFormat(RequestPart):
    name: FormatName
    description: str | None = None  # accepted and ignored
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Flag | None = None  # ignored: the schema is always enforced


class AnswerFormat(RequestPart):
    """OpenAI response format; base class for all endpoints."""

    field: ClassVar[str]  # name of the request field that holds this format
    schema_field: ClassVar[str]

    type: Literal["text", "json_object", "json_schema"]

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Returns the JSON schema, or None for other types."""
        raise NotImplementedError


class ResponseFormat(AnswerFormat):
    """`response_format` of completions and chats."""

    field: ClassVar[str] = "response_format"
    schema_field: ClassVar[str] = "response_format.json_schema.schema"

    json_schema: JsonSchemaFormat | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return None if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def _matches_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "json_schema is required for type json_schema and not allowed otherwise"
            )
        return self


class TextFormat(AnswerFormat):
    """`text.format` of responses, which has the schema's fields at the top level."""

    field: ClassVar[str] = "text.format"
    schema_field: ClassVar[str] = "text.format.schema"

    name: FormatName | None = None
    description: str | None = None  # accepted and ignored
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None  # ignored: the schema is always enforced

    @model_validator(mode="after")
    def _matches_type(self) -> "TextFormat":
        if {self.type == "json_schema"} != {self.name is not None, self.schema_ is not None}:
            raise PydanticCustomError(
                "json_schema", "name and schema are required for type json_schema and not allowed otherwise"
            )
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return self.schema_


class StructuredOutputs(RequestPart):
    """vLLM's `structured_outputs`; exactly one constraint must be given."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | None,
        Field(fail_fast=True),
        bounded(lambda most: most.choices, least=1),
    ] = None
    grammar: Annotated[str, Field(min_length=1)] | None = None  # in Lark or GBNF notation
    json_object: Flag | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1)] | None = None  # regular expression for whitespace
    disable_any_whitespace: Flag = False  # applies to whitespace between JSON tokens

    disable_additional_properties: Annotated[Any, unserved(False)] = None
    structural_tag: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _has_one_constraint(self) -> "StructuredOutputs":
        constraints = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(constraint is not None for constraint in constraints) != 1:
            names = {"names": ", ".join(CONSTRAINTS)}
            raise PydanticCustomError("constraints", "expected exactly one of {names}", names)
        return self
