"""Times the steps of a vLLM target with equal, ragged and no draft blocks, and the adapter's share of them.

    python benchmarks/vllm_steps.py CONFIG [--rows 1 4 16] [--tokens 5] [--steps 50]

CONFIG describes a deployment with `target.engine: vllm`; it needs the target's folder and the extra [vllm]. All drafts
are wrong, so rows keep their lengths in every step of a kind. The kinds alternate, and the table shows medians. The
column "adapter" is the step time outside vLLM's forward pass and sampling: conversion of the plan, vLLM's own
scheduling, and conversion of the outcomes.

On a GPU, first check that ragged steps take no longer than equal steps of as many tokens: vLLM's second model runner
replays a full CUDA graph only if all rows have the same length. Then check that the adapter takes less than a
millisecond. A second run with `--set target.vllm.enforce_eager=true` shows the gain from CUDA graphs.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.models.checkpoint import local_folder, vocabulary
from actors.vllm_engine.arguments import ENVIRONMENT
from cluster.config import SlipstreamConfig, load_config
from cluster.verification.step import Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling

PROMPT = tuple(range(10, 74))


class SteppedSessions:
    """Sessions of one vLLM core; every step contains all of them."""

    def __init__(self, core: Any, context: int, sampling: Sampling) -> None:
        self._core = core
        self._context = context
        self._sampling = sampling
        self._tokens: dict[str, tuple[int, int]] = {}  # length and last token

    def begin(self, count: int) -> None:
        names = [f"session-{index}" for index in range(count)]
        opens = tuple([self._open(name, index) for index, name in enumerate(names)])
        rows = tuple([Row(name, PROMPT, 0, decide=True, pages=()) for name in names])
        while rows:  # prompts may take several steps
            outcomes = self._core.step(StepPlan((), opens, rows))
            opens = ()
            self._tokens |= {outcome.session: (len(PROMPT), outcome.next_token) for outcome in outcomes}
            rows = tuple([row for row in rows if row.session not in self._tokens])

    def step(self, lengths: Sequence[int]) -> None:
        """Runs one step; each session feeds one token and a draft of its length, wrong from the first token on."""
        rows = []
        for (name, (length, last)), drafted in zip(self._tokens.items(), lengths, strict=True):
            draft = DraftTree.chain((0,) * drafted)
            rows.append(Row(name, (last, *draft.tokens), length, decide=True, pages=(), draft=draft))
        for row, outcome in zip(rows, self._core.step(StepPlan((), (), tuple(rows))), strict=True):
            self._tokens[row.session] = (row.base_len + outcome.accepted, outcome.next_token)

    def end(self) -> None:
        self._core.step(StepPlan(tuple(self._tokens), (), ()))
        self._tokens = {}

    def _open(self, name: str, seed: int) -> Open:
        rule = Acceptance.COUPLED
        return Open(name, 0, PROMPT, len(PROMPT), self._context, (), self._sampling, seed, 0, 0, rule, 128)


def computing_seconds(core: Any) -> Callable[[], float]:
    """Instruments the core; returns a function for the seconds of forward passes and sampling since its last call."""
    executor = core._core.model_executor
    spent = 0.0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                spent += time.perf_counter() - began

        return run

    executor.execute_model = counted(executor.execute_model)
    executor.sample_tokens = counted(executor.sample_tokens)

    def elapsed() -> float:
        nonlocal spent
        seconds = spent
        spent = 0.0
        return seconds

    return elapsed


def measure(config: SlipstreamConfig, rows: Sequence[int], tokens: int, steps: int, console: Console) -> None:
    for name, setting in ENVIRONMENT.items():
        os.environ.setdefault(name, setting)
    from actors.vllm_engine.core import start_core

    folder = local_folder(config.model.target)
    core = start_core(config, str(folder), max(vocabulary(folder)) + 1)
    computing = computing_seconds(core)
    chooser = random.Random(0)
    table = Table("rows", "blocks", "step, ms", "adapter, ms", title=f"vLLM, model runner {core.runner}")
    for count in rows:
        ragged = [chooser.randrange(tokens + 1) for _ in range(count)]
        kinds = {"none": [0] * count, f"all of {tokens}": [tokens] * count, "ragged": ragged}
        elapsed: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        sessions = SteppedSessions(core, config.model.max_context, Sampling(temperature=1.0))
        sessions.begin(count)
        for _ in range(steps):
            for kind, lengths in kinds.items():
                computing()
                began = time.perf_counter()
                sessions.step(lengths)
                seconds = time.perf_counter() - began
                elapsed[kind].append((seconds, seconds - computing()))
        sessions.end()
        for kind, found in elapsed.items():
            step_ms, adapter_ms = [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
            table.add_row(str(count), kind, f"{step_ms:.2f}", f"{adapter_ms:.2f}")
    core.close()
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=5, help="tokens per block")
    parser.add_argument("--steps", type=int, default=50, help="steps of each kind")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    measure(config, options.rows, options.tokens, options.steps, Console())


if __name__ == "__main__":
    main()
