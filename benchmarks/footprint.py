"""Measures a deployment's footprint: seconds from the command to the first token, and memory of each process.

    python benchmarks/footprint.py [--starts 3] [--streams 8] [--image]

Starts `slipstream serve` on the demo pair several times and waits for the first token each time. Then reports memory
by kind of process, idle and under load. Memory is PSS, which divides shared pages among their users, so the sum is the
total use. `--image` instead reports the disk use of the packages in `k8s/images/requirements-cpu.txt`, as installed
here.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median

import httpx
import psutil
from rich.console import Console

from cluster.errors import SlipstreamError
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS, CONFIG
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion
from serve_app.operations.local import checked_port
from tools.bench.experiment import read_prompts

SERVE = (sys.executable, "-c", "from serve_app.cli.main import main; main()", "serve")
REQUIREMENTS = Path(__file__).parents[1] / "k8s" / "images" / "requirements-cpu.txt"
PINNED = re.compile(r"^([\w.\-]+)==([\w.+!]+)", re.MULTILINE)
KINDS = (  # kind of process, and text in its command line
    ("router", "ray::ServeReplica:slipstream:Router"),
    ("drafter", "ray::ServeReplica:slipstream:Drafter"),
    ("target: coordinator", "ray::ServeReplica:slipstream:Target"),
    ("target: rank", "ray::Rank"),
    ("Serve: controller and proxy", "ray::ServeController"),
    ("Serve: controller and proxy", "ray::ProxyActor"),
    ("idle workers of Ray", "ray::IDLE"),
    ("the command itself", "serve_app.cli.main"),
)
OF_RAY = "Ray: raylet, GCS and agents"
LOADED_S = 20.0
FIRST_TOKEN_S = 300.0


@contextmanager
def served() -> Iterator[tuple[str, float, psutil.Process]]:
    """Runs `slipstream serve` in a child process; yields its URL, start time and process."""
    port = checked_port("127.0.0.1", 0)
    began = time.monotonic()
    process = subprocess.Popen([*SERVE, str(CONFIG), "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", began, psutil.Process(process.pid)
    finally:
        process.terminate()  # not SIGINT, which background processes of a script ignore
        process.wait()


def until_first_token(url: str, model: str) -> None:
    """Repeats a streaming request until it succeeds and yields its first chunk."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    deadline = time.monotonic() + FIRST_TOKEN_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError), httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.is_success and any(line.startswith("data: {") for line in response.iter_lines()):
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} sent no token within {FIRST_TOKEN_S:.0f} s; read the server's log")


def memory(command: psutil.Process) -> dict[str, float]:
    """Returns MiB by kind of process."""
    used: dict[str, float] = defaultdict(float)
    for process in [command, *command.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            kind = next((kind for kind, mark in KINDS if mark in title), OF_RAY)
            used[kind] += process.memory_full_info().pss / 2**20
    return dict(used)


async def loaded_memory(url: str, model: str, streams: int, command: psutil.Process) -> dict[str, float]:
    """Returns the peak MiB of each kind of process with `streams` concurrent streams."""
    most: dict[str, float] = {}
    prompts = [prompt.prompt for prompt in read_prompts(BENCH_PROMPTS)]
    until = time.monotonic() + LOADED_S
    async with ChatEndpoint.at(url) as endpoint:

        async def stream(place: int) -> None:
            while time.monotonic() < until:
                await endpoint.ask(model, ChatQuestion(prompts[place % len(prompts)], 64, ignore_eos=True))
                place += streams

        running = asyncio.gather(*map(stream, range(streams)))
        while not running.done():
            await asyncio.sleep(1)
            for kind, used in (await asyncio.to_thread(memory, command)).items():
                most[kind] = max(used, most.get(kind, 0.0))
        await running
    return most


def show(starts: Sequence[float], idle: Mapping[str, float], loaded: Mapping[str, float], streams: int) -> None:
    times = f"{median(starts):.1f} s ({min(starts):.1f} to {max(starts):.1f})"
    print(f"from the command to the first token: {times}, {len(starts)} starts\n")
    print(f"| process | idle, MiB | {streams} streams, MiB |\n|---|---|---|")
    for kind in loaded:
        print(f"| {kind} | {idle.get(kind, 0):.0f} | {loaded[kind]:.0f} |")
    print(f"| all | {sum(idle.values()):.0f} | {sum(loaded.values()):.0f} |")


def show_image() -> None:
    """Prints the disk use of the pinned packages, and those that are missing here or have another version."""
    sizes = {}
    missing = []
    for name, version in PINNED.findall(REQUIREMENTS.read_text()):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(f"{name} {version}")
            continue
        if found.version != version:
            missing.append(f"{name} {version} ({found.version} is here)")
        sizes[name] = sum(
            path.stat().st_size for file in found.files or () if (path := Path(str(file.locate()))).is_file()
        )
    print(f"{len(sizes)} packages, {sum(sizes.values()) / 2**20:.0f} MiB installed; missing or mismatched: {missing}")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"| {name} | {size / 2**20:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--image", action="store_true", help="report only the size of the image's packages")
    arguments = parser.parse_args()
    if arguments.image:
        show_image()
        return
    config = demo_config()
    starts = []
    try:
        prepare_target(Path(config.model.target), Console(stderr=True))
        for start in range(arguments.starts):
            with served() as (url, began, command):
                until_first_token(url, config.model.name)
                starts.append(time.monotonic() - began)
                if start == arguments.starts - 1:
                    time.sleep(5)
                    idle = memory(command)
                    loaded = asyncio.run(loaded_memory(url, config.model.name, arguments.streams, command))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    show(starts, idle, loaded, arguments.streams)


if __name__ == "__main__":
    main()
