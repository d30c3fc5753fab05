"""Compares drafting rules by acceptance: full, damped and learned noise, and rejection sampling; chains and trees.

    python benchmarks/acceptance.py [--temperatures 0.7 1] [--tokens 64] [--json FILE]
    python benchmarks/acceptance.py --nodes 1 2 4 8 12     # temperature 0: tokens per verification by block size

Runs the demo pair on the prompts of `slipstream bench` in lock step, with the real schedulers, engine and drafting
method but without a network. Reports the number of distinct texts from the coupled arms: near-ties in bfloat16 may
make them differ.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.drafters.loading import load_draft_model
from actors.drafters.model.sampling import SAMPLED_WEIGHTS, Calibration, DraftKind, Floats
from actors.models.checkpoint import local_folder
from cluster.config import SlipstreamConfig
from protos.messages import Acceptance
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from tools.bench.experiment import read_prompts
from tools.drafts.evaluation import MeasuredTarget

CPU = torch.device("cpu")
CONTEXT = 1024
LONGEST_BLOCK = 16


class FixedNoise(Calibration):
    """Weights the noise by a fixed share instead of a learned one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._weights = np.array((1.0, share, *SAMPLED_WEIGHTS[2:]))

    def weights(self, kind: DraftKind) -> Floats:
        return self._weights


@dataclass(frozen=True)
class Arm:
    """Drafting and verification rule of the compared blocks."""

    name: str
    acceptance: Acceptance = Acceptance.COUPLED
    noise: float | None = None  # weight of the noise; None: learned
    nodes: int = 4
    trees: bool = False


@dataclass(frozen=True)
class Found:
    """Acceptance of an arm's blocks."""

    arm: str
    temperature: float
    nodes: int
    first: float  # share of blocks with an accepted token at the first position
    tokens_a_verify: float


class Pair:
    """The demo's two models, loaded once."""

    def __init__(self, config: SlipstreamConfig) -> None:
        self.target = MeasuredTarget(config.model, config.target.resources_per_rank, CONTEXT)
        self._draft = config.draft
        self._setup = self.target.setup(config.draft, LONGEST_BLOCK)

    @torch.inference_mode()
    def run(
        self, arm: Arm, temperature: float, prompts: Sequence[tuple[int, ...]], tokens: int
    ) -> tuple[Found, list[str]]:
        """Runs all prompts in sequence; a learned calibration carries over from prompt to prompt."""
        assert self._draft.model is not None, "the demo drafts with a model"
        calibration = Calibration() if arm.noise is None else FixedNoise(arm.noise)
        method = load_draft_model(local_folder(self._draft.model), self._draft, self._setup, CPU, calibration)
        verifies = committed = first = 0
        texts = []
        for index, prompt in enumerate(prompts):
            generation = self.target.generation(index, prompt, tokens, temperature, arm.nodes, arm.acceptance)
            emits = list(self.target.run(generation, method, trees=arm.trees))
            verifies += len(emits)
            committed += sum(len(emit.tokens) for emit in emits)
            first += sum(emit.accepted > 0 for emit in emits)
            texts.append(str([token for emit in emits for token in emit.tokens]))
        return Found(arm.name, temperature, arm.nodes, first / verifies, committed / verifies), texts


def rules() -> list[Arm]:
    """Returns single tokens, chains and trees under each drafting rule."""
    found = []
    for shape, nodes, trees in (
        ("one token", 1, False),
        ("two siblings", 2, True),
        ("chain", 4, False),
        ("tree", 8, True),
    ):
        found += [
            Arm(f"{shape}, all noise", noise=1.0, nodes=nodes, trees=trees),
            Arm(f"{shape}, 0.7 of it", noise=0.7, nodes=nodes, trees=trees),
            Arm(f"{shape}, learned", nodes=nodes, trees=trees),
        ]
        if not trees:
            found.append(Arm(f"{shape}, ratio", Acceptance.REJECTION, nodes=nodes))
    return found


def shapes(sizes: Sequence[int]) -> list[Arm]:
    return [Arm("tree" if trees else "chain", nodes=nodes, trees=trees) for nodes in sizes for trees in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--nodes", type=int, nargs="+", help="compare chains and trees of these sizes at temperature 0")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    config = demo_config()
    prepare_target(Path(config.model.target).expanduser(), console)
    pair = Pair(config)
    prompts = [pair.target.prompt(each.prompt) for each in read_prompts(BENCH_PROMPTS)]
    arms = shapes(arguments.nodes) if arguments.nodes else rules()
    temperatures = [0.0] if arguments.nodes else arguments.temperatures
    found: list[Found] = []
    for temperature in temperatures:
        texts: dict[str, str] = {}
        for arm in track(arms, f"temperature {temperature}", console=console):
            one, said = pair.run(arm, temperature, prompts, arguments.tokens)
            found.append(one)
            console.print(
                f"{one.arm}, {one.nodes} nodes: {one.first:.3f} right, {one.tokens_a_verify:.3f} tokens a verify"
            )
            if arm.acceptance is Acceptance.COUPLED:
                texts[arm.name + str(arm.nodes)] = "".join(said)
        different = len(set(texts.values()))
        console.print(f"{len(texts)} coupled arms gave {different} text{'s' if different > 1 else ''}")
    console.print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")


def table(found: Sequence[Found]) -> Table:
    sheet = Table("temperature", "blocks", "nodes", "first place right", "tokens a verify")
    for each in found:
        sheet.add_row(
            f"{each.temperature:g}", each.arm, str(each.nodes), f"{each.first:.3f}", f"{each.tokens_a_verify:.3f}"
        )
    return sheet


if __name__ == "__main__":
    main()
