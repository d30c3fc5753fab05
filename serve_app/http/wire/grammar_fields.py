"""What a request may say of its answer's form: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

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


JsonSchema = Annotated[dict[str, Any], BeforeValidator(_schema)]


class JsonSchemaFormat(RequestPart):
    name: Annotated[str, Field(pattern=rf"^[\w-]{{1,{MAX_NAME_CHARS}}}$")]
    description: str | None = None  # accepted and not used
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Flag | None = None  # the schema is kept to in either case


class ResponseFormat(RequestPart):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "ResponseFormat":
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema is for the type json_schema, which needs it")
        return self


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
