"""Table of `slipstream status` about the versions of prompts that clients name."""

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from serve_app.tables import shown, table

FAMILY = "slipstream_prompt_version_"
VERSION = "prompt_version"


def versions_table(exposition: str) -> Table | None:
    """Sums counters by version over all routers; None if no client has named a version."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples if family.name.startswith(FAMILY) else ():
            labels = sample.labels
            what = labels.get("kind") or labels.get("until") or family.name.removeprefix(FAMILY)
            sums[labels[VERSION]][what] += sample.value
    if not sums:
        return None
    made = table(
        "Versions of prompts", "version", "requests", "acceptance rate", "first token s", "request s", "tokens"
    )
    for version, sum_of in sorted(sums.items()):
        made.add_row(
            version,
            str(int(sum_of["requests"])),
            shown(_ratio(sum_of["accepted"], sum_of["drafted"])),
            shown(_ratio(sum_of["first token"], sum_of["choices"]), ".3f"),
            shown(_ratio(sum_of["end"], sum_of["requests"]), ".3f"),
            f"{int(sum_of['prompt'])} + {int(sum_of['completion'])}",
        )
    return made


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
