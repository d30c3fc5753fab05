"""Small answers between processes, as data that cannot execute code: JSON, compressed, and validated on arrival."""

import zlib
from typing import TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

MOST_BYTES = 1 << 26  # bound of an answer's decompressed size

T = TypeVar("T")


def packed(answer: object) -> bytes:
    """Packs dataclasses, tuples, dicts and plain values."""
    return zlib.compress(to_json(answer, inf_nan_mode="constants"))


def unpacked(data: bytes, shape: TypeAdapter[T]) -> T:
    """Returns the packed answer; raises ValueError if the bytes are not an answer of this shape."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"expected a packed answer, of the same version of Slipstream: {error}") from error
    if not inflating.eof:
        raise ValueError(f"a packed answer was cut off, or holds more than {MOST_BYTES} bytes")
    return shape.validate_json(text)  # a ValidationError is a ValueError
