"""What a choice tells of the tokens behind text that its reader held back."""

from collections.abc import Sequence

from serve_app.api.choice_stream import ChoiceStream, ChoiceStreamOptions
from serve_app.api.generation import Delta
from serve_app.api.tool_calls import Content, Segment


class HoldingReader:
    """Gives out nothing before a full stop."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Segment]:
        self._held += text
        return self.finish() if text == "." else []

    def finish(self) -> list[Segment]:
        held = self._held
        self._held = ""
        return [Content(held)] if held else []


def delta(pieces: Sequence[tuple[str, bool]], rejected: Sequence[str]) -> Delta:
    text = "".join([piece for piece, _ in pieces])
    accepted = sum([drafted for _, drafted in pieces])
    return Delta(0, text, len(pieces), accepted, tuple(pieces), False, None, rejected=tuple(rejected))


def test_what_was_rejected_waits_with_its_pieces() -> None:
    telling = ChoiceStream(0, HoldingReader(), ChoiceStreamOptions(), lambda: 1)
    assert telling.parts(delta([("a", True), ("b", False)], ("", "XY"))) == []
    (part,) = telling.parts(delta([(".", False)], ("Z",)))
    assert part.text == "ab."
    assert part.trace.pieces == (("a", True), ("b", False), (".", False))
    assert part.trace.rejected == ("", "XY", "Z")
