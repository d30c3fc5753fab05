"""Decoding of answers between processes returns only the answer and runs no code."""

import math
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from cluster import telemetry
from cluster.telemetry import packed, unpacked


@dataclass(frozen=True, slots=True)
class Answer:
    name: str
    values: list[float]


SHAPE = TypeAdapter(Answer)


class CreatesFile:
    """Object that creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._path), "w")


def test_an_answer_arrives_as_it_was_sent() -> None:
    answer = Answer("ä\n", [0.1, -1e300, math.inf, -math.inf])
    assert unpacked(packed(answer), SHAPE) == answer
    (value,) = unpacked(packed(Answer("", [math.nan])), SHAPE).values
    assert math.isnan(value)


MALFORMED = {
    "nothing": b"",
    "no compression": b'{"name": "a", "values": []}',
    "cut off": packed(Answer("a", [1.0] * 1000))[:-5],
    "no JSON": zlib.compress(b"name: a"),
    "another shape": packed(["a", [1.0]]),
    "a field that is missing": packed({"name": "a"}),
    "a value of another kind": packed({"name": "a", "values": ["b"]}),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_other_values_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"packed data|Answer"):
        unpacked(data, SHAPE)


@pytest.mark.parametrize("pack", [pickle.dumps, lambda value: zlib.compress(pickle.dumps(value))])
def test_a_pickle_is_refused_and_not_run(pack: Callable[[object], bytes], tmp_path: Path) -> None:
    path = tmp_path / "touched"
    with pytest.raises(ValueError, match=r"packed data|Answer"):
        unpacked(pack(CreatesFile(path)), SHAPE)
    assert not path.exists()


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer("a" * 1000, [])
    monkeypatch.setattr(telemetry, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(ValueError, match="exceeds the limit of 100 bytes"):
        unpacked(packed(answer), SHAPE)
