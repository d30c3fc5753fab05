"""The types of fields in requests: strict values, lists that are bounded before they are looked into, fields of no use.

A list is refused for its length before any of its elements is validated, and for its first bad element: a large body
costs what its length costs, never a report of each element.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from serve_app.http.wire.bounds import RequestBounds

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
