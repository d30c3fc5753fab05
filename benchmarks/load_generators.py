"""Load generators of others against a server: vLLM's `bench serve`, GuideLLM and AIPerf, a small sweep each.

    python benchmarks/load_generators.py --programs .load/bin [--vllm VLLM] [--url URL --model NAME --tokenizer FOLDER]

Without `--url` the demo's pair is served. Each program says what it measured; all that they write is kept in `--out`.
AIPerf also reads what answers tell of their drafts: without its figures of them the run fails.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from actors.models.checkpoint import local_folder
from serve_app.cli.demo_models import demo_config
from serve_app.operations.local import serving

PROMPT_TOKENS = 64
ANSWER_TOKENS = 32
AIPERF_REPORT = "profile_export_aiperf.json"
DRAFT_FIGURES = "spec_decode"  # begins the names of its figures of drafts


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is put under load."""

    url: str
    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """How much is asked for: so many requests at each number of requests at once."""

    concurrency: tuple[int, ...]
    requests: int


def vllm_commands(program: Path, at: Endpoint, sweep: Sweep) -> dict[str, list[str]]:
    """By name: completions and chats, with each number of requests at once."""
    kinds = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}
    return {
        f"vllm-{kind}-{streams}": [
            *(str(program), "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", at.url),
            *("--model", at.model, "--tokenizer", at.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)),
            *("--num-prompts", str(sweep.requests), "--max-concurrency", str(streams), "--disable-tqdm"),
        ]
        for kind, (backend, endpoint) in kinds.items()
        for streams in sweep.concurrency
    }


def guidellm_command(program: Path, at: Endpoint, sweep: Sweep, out: Path) -> list[str]:
    return [
        *(str(program), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={at.url},model={at.model}"),
        *("--tokenizer", f"kind=hf_auto,model={at.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": list(sweep.concurrency)})),
        *("--constraint", f"kind=max_requests,count={sweep.requests}"),
        *("--output", "kind=console", "--output", f"kind=json,path={out / 'guidellm.json'}"),
    ]


def aiperf_command(program: Path, at: Endpoint, sweep: Sweep, out: Path) -> list[str]:
    return [
        *(str(program), "profile", "--url", at.url, "--model", at.model, "--tokenizer", at.tokenizer),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--ui", "none"),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(ANSWER_TOKENS)),
        *("--concurrency", ",".join(map(str, sweep.concurrency)), "--request-count", str(sweep.requests)),
        *("--artifact-dir", str(out / "aiperf")),
    ]


def check_drafts(out: Path) -> None:
    """AIPerf has figures of drafts only where its own check found nothing wrong with what answers tell of them.

    Where speculation rests for a whole run, for instance with several requests at once, answers tell of none.
    """
    reports = sorted((out / "aiperf").rglob(AIPERF_REPORT))
    found = {
        report: [name for name in json.loads(report.read_text()) if name.startswith(DRAFT_FIGURES)]
        for report in reports
    }
    for report, names in found.items():
        print(f"{report}: {', '.join(names) or 'no figures of drafts'}")
    if reports and not any(found.values()):
        raise SystemExit(
            "AIPerf has no figures of drafts: it did not take what answers tell of them, or nothing was drafted"
        )
    if not reports:
        raise SystemExit(f"AIPerf left no {AIPERF_REPORT} under {out}")


@contextmanager
def endpoint(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    if arguments.url is not None:
        yield Endpoint(arguments.url, arguments.model, arguments.tokenizer)
        return
    config = demo_config(["server.port=0"])
    folder = local_folder(config.model.target)
    with serving(config, Console(quiet=True)) as url:
        yield Endpoint(url, config.served_names[0], str(folder))


def run(name: str, command: list[str], out: Path) -> None:
    print(f"\n{name}: {' '.join(command)}\n", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (out / f"{name}.txt").write_text(done.stdout)
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder that has guidellm and aiperf")
    parser.add_argument("--vllm", type=Path, help="vLLM's command, for its bench")
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--tokenizer", help="folder of its tokenizer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=8, help="at each number of requests at once")
    parser.add_argument("--out", type=Path, default=Path("load"))
    arguments = parser.parse_args()
    if arguments.url is not None and not (arguments.model and arguments.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    sweep = Sweep(tuple(arguments.concurrency), arguments.requests)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with endpoint(arguments) as at:
        commands = {} if arguments.vllm is None else vllm_commands(arguments.vllm, at, sweep)
        commands["guidellm"] = guidellm_command(arguments.programs / "guidellm", at, sweep, out)
        commands["aiperf"] = aiperf_command(arguments.programs / "aiperf", at, sweep, out)
        for name, command in commands.items():
            run(name, command, out)
    check_drafts(out)


if __name__ == "__main__":
    main()
