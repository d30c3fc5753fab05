"""Measures memory and time of loading a model on the CPU, from an empty model to a decoder that is ready to serve.

    python benchmarks/load_memory.py [--folder FOLDER] [--model NAME] [--out FILE]

Loads the demo's target and random models of about 1 GB, each in its own process. Reports the peak of anonymous memory
over the anonymous memory that remains, both without what the process held before loading; the peak of all resident
memory, which includes mapped files, likewise; and seconds with the files in the page cache. `--folder` keeps the random
models.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

from actors.compute.collectives import SingleRank
from actors.models.checkpoint import load
from actors.models.decoder import decoder_for
from serve_app.cli.demo import demo_config, prepare_target

CPU = torch.device("cpu")
PERIOD_S = 0.002  # seconds between samples of anonymous memory
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
RANDOM: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=10),
    "gemma2": Gemma2Config(**SIZES, num_hidden_layers=10),  # runs in transformers' code
}
CASES = (
    ("demo", "bfloat16", 1),
    ("demo", "float32", 1),
    ("llama", "bfloat16", 1),
    ("llama", "float32", 1),
    ("llama", "bfloat16", 2),
    ("llama", "float32", 2),
    ("gemma2", "bfloat16", 1),
    ("gemma2", "float32", 1),
)


class Alone(SingleRank):
    """First of several ranks, which loads its share without the others."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of a process, in MiB."""

    anonymous: float
    resident_peak: float

    @classmethod
    def now(cls) -> "Usage":
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(*(int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmHWM")))


class Sampler:
    """Samples anonymous memory on a thread."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._stop = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.peak = max(self.peak, Usage.now().anonymous)


def measure(folder: Path, dtype: str, ranks: int) -> dict[str, float]:
    """Loads a model in this process; returns MiB, ratios and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = Usage.now()
    with Sampler() as sampler:
        began = time.perf_counter()
        model = load(folder, dtype, CPU, SingleRank() if ranks == 1 else Alone(ranks)).model
        loaded = time.perf_counter()
        decoder = decoder_for(model)
        packed = time.perf_counter()
        del model
    gc.collect()
    after = Usage.now()
    assert decoder, "keeps the weights"
    kept = after.anonymous - before.anonymous
    return {
        "kept_mib": round(kept, 1),
        "peak_ratio": round((sampler.peak - before.anonymous) / kept, 3),
        "resident_peak_ratio": round((after.resident_peak - before.resident_peak) / kept, 3),
        "load_s": round(loaded - began, 2),
        "pack_s": round(packed - loaded, 2),
    }


def folder_of(name: str, scratch: Path) -> Path:
    """Returns the checkpoint's folder; creates a random model that is missing."""
    if name == "demo":
        target = Path(demo_config().model.target).expanduser()
        prepare_target(target, Console(stderr=True))
        return target
    folder = scratch / name
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(RANDOM[name], dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="300MB")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps random models here")
    parser.add_argument("--model", choices=["demo", *RANDOM], help="measures only this model")
    parser.add_argument("--out", type=Path, help="writes the results as JSON")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "DTYPE", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, dtype, ranks = arguments.one
        print(json.dumps(measure(Path(folder), dtype, int(ranks))))
        return
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, dtype, ranks in CASES:
            if arguments.model not in (None, name):
                continue
            case = (str(folder_of(name, arguments.folder or Path(scratch))), dtype, str(ranks))
            # The first run reads the files into the page cache.
            runs = [subprocess.check_output([sys.executable, __file__, "--one", *case]) for _ in range(2)]
            results.append({"model": name, "dtype": dtype, "ranks": ranks, **json.loads(runs[-1].splitlines()[-1])})
            print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
