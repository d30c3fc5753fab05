"""Decorator for frozen values that are created several times per round."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[Kind]) -> type[Kind]:
    """Makes a dataclass with slots that only the type checker treats as frozen.

    Enforcing immutability at run time would cost a call per field, which makes creation three times as slow.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
