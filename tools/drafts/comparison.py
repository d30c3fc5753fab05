"""`slipstream drafts measure`: compares several drafts over the same texts of one target."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.drafters.registry import create_method
from actors.engine.process import use_cpu
from cluster.config import DraftPool, SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.tables import sheet, shown
from tools.charts import line_chart
from tools.drafts.evaluation import (
    BEST,
    DecodedText,
    DraftMeasures,
    MeasuredTarget,
    draft_prompts,
    measures,
    replay,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Comparison:
    """Drafts to measure, and parameters of the texts."""

    drafts: dict[str, SlipstreamConfig]  # by draft name
    prompts: tuple[str, ...]
    temperatures: tuple[float, ...]
    tokens: int  # number of tokens to generate per prompt
    draft_lengths: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """Results of all drafts."""

    found: list[DraftMeasures]
    step_s: float  # seconds for a one-token step of the target


def named(paths: Sequence[Path], configs: Sequence[SlipstreamConfig]) -> dict[str, SlipstreamConfig]:
    """Names configurations after their files. Raises ConfigError unless all serve the same target."""
    model = configs[0].model
    for path, config in zip(paths, configs, strict=True):
        if (config.model.target, config.model.dtype) != (model.target, model.dtype):
            raise ConfigError(
                f"{path} serves {config.model.target} in {config.model.dtype}, but {paths[0]} serves {model.target} in"
                f" {model.dtype}; compare drafts of one target"
            )
    names = [path.stem for path in paths]
    return {
        path.stem if names.count(path.stem) == 1 else str(path): config
        for path, config in zip(paths, configs, strict=True)
    }


def compare(comparison: Comparison, console: Console) -> Compared:
    """Decodes every text once, then drafts for it with every method."""
    first = next(iter(comparison.drafts.values()))
    use_cpu(first.target.resources_per_rank)
    target = MeasuredTarget(first.model, first.target.resources_per_rank, first.model.max_context)
    prompts = [target.prompt(prompt) for prompt in comparison.prompts]
    found = []
    for temperature in comparison.temperatures:
        most = max(*comparison.draft_lengths, *comparison.nodes)
        asked = [
            target.generation(index, prompt, comparison.tokens, temperature, most)
            for index, prompt in enumerate(prompts)
        ]
        texts = [
            target.decode(generation)
            for generation in track(asked, f"temperature {temperature:g}, the target", console=console, transient=True)
        ]
        for name, config in comparison.drafts.items():
            title = f"temperature {temperature:g}, {name}"
            found.append(_measured(name, config.draft, target, texts, comparison, title, console))
    return Compared(found, target.step_s)


@torch.inference_mode()
def _measured(
    name: str,
    draft: DraftPool,
    target: MeasuredTarget,
    texts: Sequence[DecodedText],
    comparison: Comparison,
    title: str,
    console: Console,
) -> DraftMeasures:
    """Measures one draft with a new method, which has no memory of other temperatures' texts."""
    longest = max(comparison.draft_lengths)
    largest = max(comparison.nodes)
    setup = target.setup(draft, max(longest, largest))
    method = create_method(draft, setup)
    inputs = zip(texts, target.states(draft, texts), draft_prompts(draft, comparison.prompts), strict=True)
    fed = [replace(text, states=rows, open=replace(text.open, draft_prompt=prompt)) for text, rows, prompt in inputs]
    asked = [replay(method, text, longest, largest) for text in track(fed, title, console=console, transient=True)]
    states_bytes = 0 if setup.states is None else setup.states.row_bytes
    temperature = texts[0].open.sampling.temperature
    return measures(name, draft.method, temperature, asked, comparison.draft_lengths, comparison.nodes, states_bytes)


# ---------------------------------------------------------------- tables, data and chart


def comparison_sheets(compared: Compared) -> list[Table]:
    """Returns one table per temperature, with one column per draft."""
    temperatures = dict.fromkeys(each.temperature for each in compared.found)
    return [_sheet(compared, temperature) for temperature in temperatures]


def _sheet(compared: Compared, temperature: float) -> Table:
    found = [each for each in compared.found if each.temperature == temperature]
    rows = [
        "method",
        "positions",
        "positions with a draft",
        *(f"agreement, best {best}" for best in range(1, BEST + 1)),
        *(f"tokens per verify, chain {most}" for most in found[0].chains),
        *(f"tokens per verify, tree {most}" for most in found[0].trees),
        "ms per draft token",
        "ms per tree",
        "bytes of states per token",
    ]
    title = f"Temperature {temperature:g}; a step of the target takes {compared.step_s * 1e3:.1f} ms"
    return sheet(title, rows, {each.draft: _column(each) for each in found})


def _column(each: DraftMeasures) -> tuple[str, ...]:
    return (
        each.method,
        str(each.positions),
        f"{each.offered:.3f}",
        *(f"{share:.3f}" for share in each.agreement),
        *(f"{value:.2f}" for value in (*each.chains.values(), *each.trees.values())),
        shown(None if each.token_s is None else each.token_s * 1e3),
        shown(None if each.tree_s is None else each.tree_s * 1e3),
        str(each.states_bytes) if each.states_bytes else "-",
    )


def comparison_data(compared: Compared) -> dict[str, Any]:
    """Returns the results as JSON-compatible data."""
    return {"target_step_s": compared.step_s, "drafts": [asdict(each) for each in compared.found]}


def comparison_chart(compared: Compared) -> "Figure":
    """Plots tokens per verification against block size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in compared.found:
        name = f"{each.draft}, T {each.temperature:g}"
        lines[f"{name}, chain"] = [(float(most), value) for most, value in each.chains.items()]
        lines[f"{name}, tree"] = [(float(most), value) for most, value in each.trees.items()]
    return line_chart(lines, {"non-speculative decoding": 1.0}, "block size, tokens", "tokens per verify", (9.6, 4.8))
