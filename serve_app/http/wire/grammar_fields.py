"""What a request may say of its answer's form: OpenAI's `response_format` and `text.format`, vLLM's own field."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from serve_app.http.wire.field_types import Flag, RequestPart, bounded, unserved

MAX_NAME_CHARS = 64
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
