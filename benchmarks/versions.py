"""Compares the throughput of two checkouts of this repository, before and after a change.

    python benchmarks/versions.py --before ../older [--concurrency 1,4,16] [--rounds 5] [--tokens 64] [--json OUT]
    python benchmarks/versions.py --before ../older --temperature 1 --plain

Each checkout serves the demo pair with its own code, config and draft, from its own Ray cluster; target and drafter are
pinned to one core each, as in `pipeline.py`. Both receive the same prompts over HTTP, one checkout after the other in
alternating order. An interval that contains 1 means no measurable difference. `--plain` adds non-speculative decoding
on the newer checkout.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rounds import Arm, Rounds, add_options, measure
from servers import OTHERS_CORE, PINNED

from serve_app.demo_data import BENCH_PROMPTS
from tools.bench.experiment import read_prompts

CONFIGS = ("serve_app/demo_data/smollm2.yaml", "examples/smollm2.yaml")  # demo configs, newest path first
START_S = 300.0
READY = re.compile(r"is ready: (http://\S+)/v1")


def command_of(checkout: Path) -> list[str]:
    """Returns the command of `slipstream serve` in a checkout; finds its entry point in pyproject.toml."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["slipstream"].partition(":")
    config = next(path for path in CONFIGS if (checkout / path).is_file())
    settings = [part for setting in PINNED for part in ("--set", setting)]
    return [sys.executable, "-c", f"from {module} import {function}; {function}()", "serve", config, *settings]


@contextmanager
def served(checkout: Path) -> Iterator[str]:
    """Runs a server from the checkout; yields its URL and stops it on exit."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = ["taskset", "--cpu-list", str(OTHERS_CORE), *command_of(checkout)]
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        began = time.monotonic()
        for line in process.stdout:
            if found := READY.search(line):
                yield found[1]
                return
            if time.monotonic() - began > START_S:
                break
        raise SystemExit(f"{checkout} was not ready within {START_S:.0f} s; see its output above")
    finally:
        process.terminate()
        process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the older checkout")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="also compare with non-speculative decoding")
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    add_options(parser)
    arguments = parser.parse_args()
    arms = [Arm("after", "after"), Arm("before", "before"), *([Arm("plain", "after", 0)] if arguments.plain else [])]
    plan = Rounds.of(arguments, arms, [("after", arm.name) for arm in arms[1:]])
    prompts = read_prompts(arguments.prompts)
    os.sched_setaffinity(0, [OTHERS_CORE])
    here = Path(__file__).resolve().parents[1]
    with served(here) as after, served(arguments.before.resolve()) as before:
        asyncio.run(measure(plan, {"after": after, "before": before}, prompts, {}))


if __name__ == "__main__":
    main()
