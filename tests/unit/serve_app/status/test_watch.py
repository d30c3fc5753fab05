"""Tests the output of `slipstream status --watch`."""

from rich.console import Console

from serve_app.page.routes import page_state
from serve_app.status import watched
from tests.unit.serve_app.page.test_state import DRAFTER, LATER, TARGET


def test_the_terminal_shows_everything_on_the_page() -> None:
    console = Console(width=120)
    state = page_state("the-model", [TARGET], [LATER, DRAFTER])
    with console.capture() as shown:
        console.print(watched("http://here", state.model_dump(mode="json")))
    text = shown.get()
    for words in ("the-model at http://here", "40.0", "75%", "lookup", "1.50", "80%"):
        assert words in text


def test_a_first_sample_has_dashes() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(watched("u", page_state("m", [], [TARGET]).model_dump(mode="json")))
    assert "-" in shown.get()
