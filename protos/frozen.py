"""Decorator for immutable values created several times per round."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[Kind]) -> type[Kind]:
    """Makes a dataclass with slots; only the type checker enforces immutability.

    Run-time enforcement costs a call per field, which triples the creation time.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
