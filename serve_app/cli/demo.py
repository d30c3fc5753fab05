"""The demo: three prompts, their answers with drafted text marked, and the acceptance worksheet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Piece, Tally, TimedAnswer
from serve_app.tables import TALLY_ROWS, sheet, shown, tally_column

MAX_TOKENS = 96
WARM_UP = ChatQuestion("Hello!", max_tokens=8)
DRAFTED = "bold green underline"
PROMPTS = {
    "chat": "Why is the sky blue?",
    "code": "Write a Python function that returns the largest number in a list.",
    "rewriting": "Rewrite this sentence in a more formal tone: we can't come tomorrow because the car broke down.",
}
WORKSHEET_ROWS = (*TALLY_ROWS, "tokens/s with speculation", "tokens/s without", "speed-up", "answers that are equal")


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One prompt, answered with and without speculation."""

    name: str
    tally: Tally
    speculative: TimedAnswer
    plain: TimedAnswer


async def run_demo(url: str, console: Console) -> None:
    """Answers every prompt with and without speculation, and prints the results."""
    async with ChatEndpoint.at(url) as endpoint:
        model = await endpoint.model()
        with console.status("Warming up"):
            await endpoint.ask(model, WARM_UP)
        console.print(legend(console))
        rows = [await _ask_both_ways(endpoint, model, name, prompt, console) for name, prompt in PROMPTS.items()]
    console.print(worksheet(rows))


async def _ask_both_ways(endpoint: ChatEndpoint, model: str, name: str, prompt: str, console: Console) -> DemoRow:
    console.print(f"\n[bold]{name}:[/] {prompt}")
    await endpoint.ask(model, ChatQuestion(prompt, max_tokens=1))  # so that both answers find the prompt cached
    before = (await endpoint.counters()).tally
    speculative = await endpoint.ask(
        model, ChatQuestion(prompt, MAX_TOKENS), lambda pieces: show_pieces(pieces, console)
    )
    tally = (await endpoint.counters()).tally - before
    console.print()
    with console.status("The same without speculation"):
        plain = await endpoint.ask(model, ChatQuestion(prompt, MAX_TOKENS, max_draft_tokens=0))
    return DemoRow(name, tally, speculative, plain)


def legend(console: Console) -> Text:
    return (
        Text("Drafted and accepted: ").append_text(_piece("like this", True, console)).append("; else the target's own")
    )


def show_pieces(pieces: Sequence[Piece], console: Console) -> None:
    for drafted, run in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(text for text, _ in run)
        console.print(_piece(text, drafted, console), end="", soft_wrap=True)


def _piece(text: str, drafted: bool, console: Console) -> Text:
    """Drafted text in colour, or between marks where there is none."""
    if drafted and not console.is_terminal:
        return Text(f"‹{text}›")
    return Text(text, style=DRAFTED if drafted else "")


def worksheet(rows: Sequence[DemoRow]) -> Table:
    """The acceptance worksheet: a column for each prompt, and one for all of them."""
    columns = {row.name: _column(row.tally, [row.speculative], [row.plain]) for row in rows}
    total = sum((row.tally for row in rows), Tally())
    columns["all"] = _column(total, [row.speculative for row in rows], [row.plain for row in rows])
    return sheet("Acceptance worksheet", WORKSHEET_ROWS, columns)


def _column(tally: Tally, speculative: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> tuple[str, ...]:
    with_ = _tokens_per_s(speculative)
    without = _tokens_per_s(plain)
    same = sum(one.text == other.text for one, other in zip(speculative, plain, strict=True))
    speeds = shown(with_, ".1f"), shown(without, ".1f"), f"{with_ / without:.2f}x"
    return (*tally_column(tally), *speeds, f"{same} of {len(plain)}")


def _tokens_per_s(answers: Sequence[TimedAnswer]) -> float:
    return sum(answer.tokens for answer in answers) / sum(answer.latency_s for answer in answers)
