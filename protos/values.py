"""Frozen values that are made several times in every round."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[Kind]) -> type[Kind]:
    """A frozen dataclass with slots, but that it is the type checker who lets nobody write to it.

    The interpreter does that at the price of a call for each field of each new value, which makes it take thrice as
    long.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
