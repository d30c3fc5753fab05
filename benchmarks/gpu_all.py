"""Measures engine, drafting and system on one GPU in at most ten minutes, without Ray.

    python benchmarks/gpu_all.py [--stages ABCDEF] [--json FILE]
    python benchmarks/gpu_all.py --tiny

The stages are A facts, B correctness, C target, D draft, E host and F system; the modules of `gpu_stages` describe
them. All models have random weights and published shapes. Each stage runs in a process of its own, so a failed or slow
stage costs only its own results. The JSON file is complete after every stage. The command ends itself after 560 s and
skips stages that no longer fit. `--tiny` runs all stages on a CPU with tiny shapes, as a test. The exit status is 1 if
a stage failed, and with `--tiny` also if one was cut or skipped.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from gpu_stages import correctness, draft, facts, host, system, target
from gpu_stages.results import (
    CUT,
    DONE,
    FAILED,
    OUT_OF_TIME,
    RUNNING,
    SKIPPED,
    Emit,
    Result,
    Setting,
    StageReport,
    Unmeasured,
    summary_table,
    tables,
    write,
)
from rich.console import Console

LIMIT_S = 560.0
GRACE_S = 10.0  # from a stage's own end to that of its process
WIDTH = 150  # columns of tables in files
TITLES = {"A": "facts", "B": "correctness", "C": "target", "D": "draft", "E": "host", "F": "system"}


@dataclass(frozen=True)
class Stage:
    """One stage and the least time that it needs on a GPU."""

    run: Callable[[Setting, Emit], None]
    summary: Callable[[Sequence[Result]], str]
    needs_s: float


STAGES: Mapping[str, Stage] = {
    "A": Stage(facts.run, facts.summary, 15),
    "B": Stage(correctness.run, correctness.summary, 40),
    "C": Stage(target.run, target.summary, 60),
    "D": Stage(draft.run, draft.summary, 40),
    "E": Stage(host.run, host.summary, 40),
    "F": Stage(system.run, system.summary, 170),
}


@dataclass(frozen=True)
class Failure:
    """Error of a stage, and its traceback."""

    why: str
    traceback: str


def allotted_s(left_s: float, needs_s: Sequence[float]) -> float:
    """Returns the time of the first of these stages; 0 if it does not fit.

    The stages after it keep their least times, unless the first one then lacks its own.
    """
    first, *others = needs_s
    return 0.0 if left_s < first else max(first, left_s - sum(others))


def run_stage(letter: str, setting: Setting, store: Callable[[StageReport], None]) -> StageReport:
    """Runs a stage in a new process, stores a report after every result, and kills the process at its end time."""
    stage = STAGES[letter]
    context = multiprocessing.get_context("fork")  # saves the imports; CUDA starts in the new process
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(stage, setting, sender))
    began = time.monotonic()
    process.start()
    sender.close()
    results: list[Result] = []
    failure = Failure("", "")

    def report(state: str, why: str = "") -> StageReport:
        seconds = time.monotonic() - began
        summary = stage.summary(results)
        return StageReport(letter, TITLES[letter], state, seconds, summary, why, failure.traceback, tuple(results))

    try:
        while receiver.poll(max(0.0, setting.ends_s + GRACE_S - time.monotonic())):
            try:
                received = receiver.recv()
            except EOFError:
                break
            if isinstance(received, Failure):
                failure = received
            else:
                results.append(received)
                store(report(RUNNING))
        else:
            return report(CUT, "its time was over")
        process.join()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it started
    if failure.why or process.exitcode:
        return report(FAILED, failure.why or f"its process ended with status {process.exitcode}")
    is_cut = any(isinstance(result, Unmeasured) and result.why == OUT_OF_TIME for result in results)
    return report(CUT, OUT_OF_TIME) if is_cut else report(DONE)


def _in_process(stage: Stage, setting: Setting, sender: Connection) -> None:
    os.setsid()  # a group of its own, to end all its processes at once
    torch.backends.cuda.enable_cudnn_sdp(False)  # serving turns it off too; see `device_of`
    if setting.is_tiny:
        torch.set_num_threads(1)
    try:
        stage.run(setting, sender.send)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        sender.send(Failure(f"{type(error).__name__}: {lines[0]}", traceback.format_exc()))
        raise


def run_all(
    letters: Sequence[str], setting: Setting, store: Callable[[Sequence[StageReport]], None], console: Console
) -> list[StageReport]:
    """Runs stages in order, stores all reports after every result, and prints tables after every stage."""
    reports: list[StageReport] = []
    for index, letter in enumerate(letters):
        left_s = setting.ends_s - time.monotonic()
        needs_s = [0.0 if setting.is_tiny else STAGES[other].needs_s for other in letters[index:]]
        allotted = allotted_s(left_s - GRACE_S, needs_s)
        console.rule(f"{letter} {TITLES[letter]}")
        if allotted <= 0:
            why = f"it needs {needs_s[0]:.0f} s, and {max(0.0, left_s):.0f} s are left"
            reports.append(StageReport(letter, TITLES[letter], SKIPPED, 0.0, "", why))
        else:
            own = replace(setting, ends_s=time.monotonic() + allotted)
            reports.append(run_stage(letter, own, lambda report: store([*reports, report])))
        for table in tables(reports[-1].results):
            console.print(table)
        if reports[-1].why:
            console.print(f"{reports[-1].state}: {reports[-1].why}", markup=False)
        store(reports)
    return reports


def main() -> None:
    began = time.monotonic() - (time.time() - psutil.Process().create_time())  # includes imports
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="".join(STAGES), help="letters of the stages to run")
    parser.add_argument("--json", type=Path, default=Path("gpu_all.json"), help="file for all results")
    parser.add_argument("--tiny", action="store_true", help="run with tiny shapes, by default on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, and cpu with --tiny")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for the whole command")
    arguments = parser.parse_args()
    letters = [letter for letter in STAGES if letter in arguments.stages.upper()]
    if unknown := set(arguments.stages.upper()) - set(STAGES):
        parser.error(f"no stage is named {', '.join(sorted(unknown))}; choose from {''.join(STAGES)}")
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    if device.type == "cpu" and not arguments.tiny:
        parser.error("the full shapes are for a GPU; pass --tiny for a CPU")
    if device.type == "cuda" and not torch.cuda.device_count():  # asks the driver, without starting CUDA before a fork
        parser.error("torch finds no CUDA device; run on a GPU, or pass --tiny for a test on a CPU")
    setting = Setting(device, arguments.tiny, began + arguments.limit)
    path: Path = arguments.json
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    run_facts = {"device": device.type, "tiny": arguments.tiny, "limit_s": arguments.limit, "began": time.time()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended by a signal; all results until then are in {path}"))
    reports = run_all(letters, setting, partial(write, path, run_facts), console)
    console.print(summary_table(reports))
    console.print(f"All results are in {path}.")
    bad = (CUT, FAILED, SKIPPED) if arguments.tiny else (FAILED,)
    sys.exit(any(report.state in bad for report in reports))


if __name__ == "__main__":
    main()
