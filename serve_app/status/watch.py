"""`slipstream status --watch`: the content of the live page in a terminal, refreshed every second."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.endpoint_client import ChatEndpoint
from serve_app.tables import shown, table

PERIOD_S = 1.0
BAR_CHARS = 24
State = dict[str, Any]


async def watch(url: str, key: str | None, console: Console) -> None:
    """Shows the state until interrupted. Raises EndpointError if nothing answers."""
    async with ChatEndpoint.at(url, key) as endpoint:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(watched(url, await endpoint.page_state()), refresh=True)
                await asyncio.sleep(PERIOD_S)


def watched(url: str, state: State) -> Group:
    """Renders one snapshot of the server's state."""
    figures = table(f"{state['model']} at {url}", "now", "")
    figures.add_row("tokens/s", shown(state["tokens_per_s"], ".1f"))
    figures.add_row("target busy", _percent(state["busy"]))
    figures.add_row("draft tokens accepted", _percent(state["accepted"]))
    return Group(figures, _targets(state["targets"]), _drafters(state["drafters"]), _acceptance(state["acceptance"]))


def _targets(targets: Sequence[State]) -> Table:
    made = table("Targets", "replica", "sessions", "queued", "busy", "tokens/s", "cache held", "speculation", "gain")
    for one in targets:
        speculation = "on" if one["is_drafted_for"] else "off"
        rates = _percent(one["busy"]), shown(one["tokens_per_s"], ".1f"), _percent(one["cache"])
        made.add_row(one["name"], str(one["sessions"]), str(one["queued"]), *rates, speculation, shown(one["gain"]))
    return made


def _drafters(drafters: Sequence[State]) -> Table:
    made = table("Drafters", "replica", "sessions", "method", "draft tokens/s", "passes ahead of a verdict")
    for one in drafters:
        rates = shown(one["draft_tokens_per_s"], ".1f"), _percent(one["ahead"])
        made.add_row(one["name"], str(one["sessions"]), one["method"], *rates)
    return made


def _acceptance(chances: Sequence[float]) -> Table:
    made = Table(title="Acceptance by position in a block", title_justify="left", show_header=False)
    for position, chance in enumerate(chances, 1):
        made.add_row(str(position), _percent(chance), Text("█" * round(BAR_CHARS * chance), style="green"))
    return made


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
