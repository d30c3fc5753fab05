"""Tables of `slipstream status` about acceptance: load checks of drafters, remedies for bad ones, and counts.

All tables are made from what replicas answer to `inspect`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from cluster.routing.assignment import LOST, PLANNED
from serve_app.tables import shown, table

REMEDIES = ("resynced", "replaced", "plain", "given up")
POSITIONS = 6  # number of positions in a block that are shown


def drafters_table(drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates drafters with their load checks; a warning stays for the life of the drafter."""
    made = table("Drafters", "drafter", "address", "method", "expected", "accepted", "check at load")
    for one in drafters:
        check = one["load_check"]
        shares = shown(check["expected"]), shown(check["reached"])
        made.add_row(one["name"], one["address"], one["method"], *shares, _found(check))
    return made


def remedies_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates what routers did about drafters whose blocks became bad.

    Remedies are counted in sessions; "given up" counts the times that a drafter was given up.
    """
    made = table("Blocks that became bad", "drafter", *REMEDIES)
    counts: Counter[tuple[str, str]] = Counter()
    for one in routers:
        counts.update(one["remedies"])
    for drafter in sorted({drafter for drafter, _ in counts}):
        made.add_row(drafter, *(str(counts[drafter, remedy]) for remedy in REMEDIES))
    return made


def handovers_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates sessions that left a target or a drafter before their end, planned or because it was lost."""
    made = table("Sessions that went on elsewhere", "pool", PLANNED, LOST)
    counts: Counter[tuple[str, str]] = Counter()
    for one in routers:
        counts.update(one["handovers"])
    for pool in ("target", "drafter"):
        made.add_row(pool, str(counts[pool, PLANNED]), str(counts[pool, LOST]))
    return made


def acceptance_table(targets: Sequence[Mapping[str, Any]], drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulates the acceptance of each position of a block, given those before it, by kind of block."""
    places = [str(position) for position in range(1, POSITIONS + 1)]
    made = table("Acceptance by position", "drafter", "method", "context", "prefix", "blocks", *places)
    methods = {one["name"]: one["method"] for one in drafters}
    sums: dict[tuple[str, int, bool], tuple[Counter[int], Counter[int]]] = {}
    for row in (row for target in targets for row in target["tally"]):
        kind = (row["drafter"], row["context"], row["is_prefix_cached"])
        reached, accepted = sums.setdefault(kind, (Counter(), Counter()))
        reached.update(dict(enumerate(row["reached"])))
        accepted.update(dict(enumerate(row["accepted"])))
    for (drafter, context, is_cached), (reached, accepted) in sorted(sums.items()):
        shares = [shown(accepted[at] / reached[at] if reached[at] else None) for at in range(POSITIONS)]
        octave = f"{context}-{2 * context - 1}"
        prefix = "cached" if is_cached else "computed"
        made.add_row(drafter, methods.get(drafter, "-"), octave, prefix, str(reached[0]), *shares)
    return made


def _found(check: Mapping[str, Any]) -> str:
    if check["warning"] is not None:
        return f"far below: {check['warning']}"
    return "as expected" if check["is_over"] else f"{check['tokens']} tokens so far"
