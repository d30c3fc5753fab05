"""Stage A: the device, its versions, clocks and copy bandwidth."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_stages.results import Emit, Result, Setting
from gpu_stages.steps import copy_bandwidth

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python", "transformers", "numpy")
QUERIED = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit", "persistence_mode",
    "mig.mode.current",
)  # fmt: skip


@dataclass(frozen=True)
class Machine(Result):
    """Device and host."""

    device: str
    commit: str | None
    cores: int
    python: str
    cuda: str | None
    capability: str | None
    processors: int | None  # streaming multiprocessors
    memory_bytes: int | None
    copy_bytes_per_s: float  # reads and writes


@dataclass(frozen=True)
class Version(Result):
    """Installed version of a package; None if it is missing."""

    package: str
    version: str | None


@dataclass(frozen=True)
class GpuFact(Result):
    """A property that nvidia-smi reports."""

    name: str
    value: str


def run(setting: Setting, emit: Emit) -> None:
    device = setting.device
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    emit(
        Machine(
            device=platform.processor() or platform.machine() if properties is None else properties.name,
            commit=_output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
            cores=os.cpu_count() or 1,
            python=platform.python_version(),
            cuda=torch.version.cuda,
            capability=None if properties is None else f"{properties.major}.{properties.minor}",
            processors=None if properties is None else properties.multi_processor_count,
            memory_bytes=None if properties is None else properties.total_memory,
            copy_bytes_per_s=copy_bandwidth(device),
        )
    )
    for package in PACKAGES:
        emit(Version(package, _version(package)))
    if properties is not None and (
        values := _output("nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader")
    ):
        for name, value in zip(QUERIED, values.splitlines()[0].split(", "), strict=False):
            emit(GpuFact(name, value))


def summary(results: Sequence[Result]) -> str:
    machines = [result for result in results if isinstance(result, Machine)]
    return "; ".join(f"{one.device}, copies {one.copy_bytes_per_s / 1e9:.0f} GB/s" for one in machines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Returns a command's output; None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
