"""Progress of long commands: a bar on a terminal, else lines on stderr, which keep redirected results clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

LINES = 20  # approximate number of lines for a whole command


def log_phase(console: Console, text: str) -> None:
    """Writes a phase to stderr unless `console` is a terminal, which shows phases by itself."""
    if not console.is_terminal:
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


@contextmanager
def progress(console: Console, text: str, total: int, transient: bool = False) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` steps, and shows the number of calls after `text`.

    `transient` removes the bar at the end.
    """
    if console.is_terminal:
        columns = *Progress.get_default_columns(), MofNCompleteColumn()
        with Progress(*columns, console=console, transient=transient) as shown:
            bar = shown.add_task(text, total=total)
            yield lambda: shown.advance(bar)
        return
    steps = count(1)
    interval = -(-total // LINES)

    def advance() -> None:
        done = next(steps)
        if done in (1, total) or done % interval == 0:
            log_phase(console, f"{text}: {done} of {total}")

    yield advance
