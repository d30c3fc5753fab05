"""Tests the trace of tokens whose text the reader held back."""

from serve_app.api.choices import ChoiceStream, ChoiceStreamOptions, Delta, Piece
from serve_app.api.tool_calls import Content, Segment


class HoldingReader:
    """Reader that releases text only after a full stop."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Segment]:
        self._held += text
        return self.finish() if text == "." else []

    def finish(self) -> list[Segment]:
        held = self._held
        self._held = ""
        return [Content(held)] if held else []


def delta(*pieces: Piece) -> Delta:
    text = "".join([piece.text for piece in pieces])
    return Delta(0, text, len(pieces), sum(piece.drafted for piece in pieces), pieces, False, None)


def test_rejected_text_waits_with_its_pieces() -> None:
    stream = ChoiceStream(0, HoldingReader(), ChoiceStreamOptions(trace=True), lambda: 1)
    assert stream.events(delta(Piece("a", True), Piece("b", False, "XY"))) == []
    (event,) = stream.events(delta(Piece(".", False, "Z")))
    assert event.text == "ab."
    assert event.trace.pieces == (("a", True), ("b", False), (".", False))
    assert event.trace.rejected == ("", "XY", "Z")
