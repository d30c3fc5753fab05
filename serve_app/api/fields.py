"""The types of fields in requests: strict values, lists that are bounded before they are looked into, fields of no use.

A list is refused for its length before any of its elements is validated, and for its first bad element: a large body
costs what its length costs, never a report of each element.

How much one request may hold: each bound is looked at before what it bounds is.

From a body's bytes to a request, or to a refusal that is short whatever the body is.

Pure, and made for a thread beside the event loop.

Fields that clients of OpenAI and vLLM send and that change nothing here.

Inert ones are accepted with any value of their type: they tell a hosted service who asks, what to keep or how to bill.
The others ask for a feature that is not served: the values that leave it off are accepted, any other is refused by
name, for an answer without the feature would be a wrong one.

What a request may say of its answer's form: OpenAI's `response_format` and `text.format`, vLLM's own field.

Fields of requests that say which tokens may come, when an answer ends, and what is told of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema, from_json

from cluster.errors import RequestError
from protos.from_pb import MAX_BIAS, MAX_SALT_CHARS, REPETITION_PENALTIES
from protos.messages import MAX_TOP


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Most items of each list of a request."""

    prompts: int = 128
    prompt_tokens: int = 1 << 20  # of one prompt that is given as tokens
    messages: int = 4096
    parts: int = 256  # of one message
    tools: int = 128
    variables: int = 64  # for a chat template
    stops: int = 4096
    words: int = 1024  # in `bad_words`
    token_ids: int = 4096  # in `logit_bias`, and in `stop_token_ids`
    allowed: int = 1 << 18  # token ids
    choices: int = 4096  # that an answer may be one of
    labels: int = 16  # in `metadata`
    containers: int = 1 << 15  # lists and objects of a whole body
    members: int = 1 << 16  # fields of all its objects
    strings: int = 160_000  # names and texts of as many fields, and of lists, where brackets and colons may be text


MAX_FAULTS = 10  # that one refusal reports
NULL = {"type": "null"}

Integer = Annotated[int, Field(strict=True)]  # neither 1.0 nor "1" nor true
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[Integer, Field(ge=-(2**63), lt=2**64)]  # 64 bits, with a sign or without
Count = Annotated[Integer, Field(ge=1, lt=2**63)]


class RequestPart(BaseModel):
    """An object in a request: an unknown field is refused, null is "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """What is given of the known fields, and of the unknown ones as many as a refusal names."""
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = {name: data[name] for name in names if data.get(name) is not None}
        unknown = (name for name in data if name not in names)
        return known | dict.fromkeys(islice(unknown, MAX_FAULTS))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler.resolve_ref_schema(handler(core))
        fields = described.get("properties", {})
        for name in fields.keys() - set(described.get("required", ())):
            fields[name] = _or_null(fields[name])
        return described


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be left out."""
    if None in field.get("enum", ()):
        return field
    own = {name: value for name, value in field.items() if name in ("title", "default", "description")}
    taken = {name: value for name, value in field.items() if name not in own}
    kinds = taken["anyOf"] if taken.keys() == {"anyOf"} else [taken]
    return own | {"anyOf": [*kinds, *([] if NULL in kinds else [NULL])]}


@dataclass(frozen=True, slots=True, eq=False)  # True and 1 are equal, and Annotated would keep one for both
class Unserved:
    """Of a field: only these values pass."""

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
    """A field of a feature that is not served: only null and the given values, which ask for nothing, pass."""
    return Unserved(neutral)


def bounded(most: Callable[[RequestBounds], int], least: int = 0) -> BeforeValidator:
    """A list or an object that has so many items; checked before they are."""

    def check(value: Any, info: ValidationInfo) -> Any:
        limit = most(info.context or RequestBounds())
        if isinstance(value, list | dict) and not least <= len(value) <= limit:
            counts = {"count": len(value), "least": least, "limit": limit}
            raise PydanticCustomError("length", "this has {count} items, expected {least} to {limit}", counts)
        return value

    return BeforeValidator(check)


def as_list(is_single: Callable[[Any], bool], taken: Any) -> BeforeValidator:
    """A field that takes one item or a list of them is always a list inside; `taken` is the type of both."""
    return BeforeValidator(lambda value: [value] if is_single(value) else value, json_schema_input_type=taken)


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
    """The request in a JSON body."""
    _check_structure(body, bounds)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {shortened(str(error))}", code="invalid_json") from error
    return check(schema, data, bounds)


def check(schema: type[RequestT], data: object, bounds: RequestBounds) -> RequestT:
    """The request that read data makes."""
    try:
        return schema.model_validate(data, context=bounds)
    except ValidationError as error:
        raise _refusal(error) from error


def shortened(text: str, most: int = MAX_FAULT_CHARS) -> str:
    """Its beginning, where it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def _check_structure(body: bytes, most: RequestBounds) -> None:
    """Refuses more of what becomes objects than any request has, by counting bytes: to read it would take far longer.

    A pair of brackets becomes an object of a hundred bytes, and a name in an object costs ten times an item of a list.
    """
    if _containers(body) <= most.containers and _members(body) <= most.members:
        return  # with all that is text
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(unescaped.count(b'"') // 2, most.strings, "strings")
    without_text = b"".join(unescaped.split(b'"')[::2])
    _check_count(_containers(without_text), most.containers, "lists and objects")
    _check_count(_members(without_text), most.members, "fields")


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _members(body: bytes) -> int:
    return body.count(b":")


def _check_count(found: int, most: int, of_what: str) -> None:
    if found > most:
        raise RequestError(f"the body holds more than {most} {of_what}, which is the most this server takes")


def _refusal(error: ValidationError) -> RequestError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = [(_path(fault["loc"]), shortened(fault["msg"])) for fault in faults[:MAX_FAULTS]]
    message = "; ".join(f"{path or 'body'}: {fault}" for path, fault in told)
    untold = len(faults) - len(told)
    return RequestError(f"{message}; and {untold} more" if untold else message, told[0][0] or None, _code(faults[0]))


def _code(fault: ErrorDetails) -> str:
    """What OpenAI calls it."""
    kind = fault["type"]
    return CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    return "".join(map(_step, location)).removeprefix(".")


def _step(part: Any) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{shortened(part, MAX_NAME_CHARS)}"


class UnservedFields(RequestPart):
    """Of both endpoints."""

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
    """Of completions."""

    add_special_tokens: Annotated[Any, unserved(True)] = None
    best_of: Annotated[Any, unserved(1)] = None
    prompt_embeds: Annotated[Any, unserved()] = None
    suffix: Annotated[Any, unserved("")] = None


class UnservedChatFields(UnservedFields):
    """Of chat completions."""

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
    """Of a chat's message; clients send an answer's message back as it was."""

    name: str | None = None
    parsed: Any = None  # OpenAI's client sends its own reading back

    annotations: Annotated[Any, unserved([])] = None
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved()] = None
    refusal: Annotated[Any, unserved()] = None


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def _schema(value: Any) -> Any:
    """vLLM takes a JSON schema as an object, or as text that is one."""
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
    description: str | None = None  # accepted and not used
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Flag | None = None  # the schema is kept to in either case


class AnswerFormat(RequestPart):
    """OpenAI's, in any of the ways in which its endpoints are told of it."""

    field: ClassVar[str]  # by which a request has it
    schema_field: ClassVar[str]

    type: Literal["text", "json_object", "json_schema"]

    @property
    def asked_schema(self) -> dict[str, Any] | None:
        """Of the type json_schema."""
        raise NotImplementedError


class ResponseFormat(AnswerFormat):
    """That of completions and chats."""

    field: ClassVar[str] = "response_format"
    schema_field: ClassVar[str] = "response_format.json_schema.schema"

    json_schema: JsonSchemaFormat | None = None

    @property
    def asked_schema(self) -> dict[str, Any] | None:
        return None if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "ResponseFormat":
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema is for the type json_schema, which needs it")
        return self


class TextFormat(AnswerFormat):
    """That of responses, where all stands side by side."""

    field: ClassVar[str] = "text.format"
    schema_field: ClassVar[str] = "text.format.schema"

    name: FormatName | None = None
    description: str | None = None  # accepted and not used
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None  # the schema is kept to in either case

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "TextFormat":
        if {self.type == "json_schema"} != {self.name is not None, self.schema_ is not None}:
            raise PydanticCustomError("json_schema", "name and schema are for the type json_schema, which needs both")
        return self

    @property
    def asked_schema(self) -> dict[str, Any] | None:
        return self.schema_


class StructuredOutputs(RequestPart):
    """vLLM's; exactly one of the constraints."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | None,
        Field(fail_fast=True),
        bounded(lambda most: most.choices, least=1),
    ] = None
    grammar: Annotated[str, Field(min_length=1)] | None = None  # Lark's notation, or GBNF
    json_object: Flag | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1)] | None = None  # a regular expression: what JSON has between
    disable_any_whitespace: Flag = False  # of JSON

    disable_additional_properties: Annotated[Any, unserved(False)] = None
    structural_tag: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _has_one_constraint(self) -> "StructuredOutputs":
        asked = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(constraint is not None for constraint in asked) != 1:
            names = {"names": ", ".join(CONSTRAINTS)}
            raise PydanticCustomError("constraints", "exactly one of {names} is to be there", names)
        return self


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
    logit_bias: Annotated[
        dict[TokenId, Bias], BeforeValidator(_as_ids), bounded(lambda most: most.token_ids)  # the last comes first
    ] = Field(default_factory=dict)
    bad_words: Annotated[tuple[Word, ...], Field(fail_fast=True), bounded(lambda most: most.words)] = ()
    allowed_token_ids: Annotated[
        tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.allowed, least=1)
    ] = ()
    min_tokens: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.token_ids)] = ()
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True  # as the model's decoder has them; false: between added tokens are none
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = None  # -1: as many as there is room for
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: Top | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] = 0  # lower numbers first
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("no_tokens", "this is 0, expected -1, or at least 1")
        return value
