"""Runs the Dockerfile's steps in an empty Debian root, without Docker: `make image-steps VARIANT=cpu`, as root.

There are three differences from a Docker build. Python is Debian's, as a venv in /usr/local. All stages share one root.
Steps use this machine's certificates and pip settings (PIP_*), including folders of wheels.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from string import Template
from tempfile import TemporaryDirectory
from typing import NamedTuple

IMAGES = Path(__file__).parent
CONTEXT = IMAGES.parents[1]
PIP = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
READABLE = ["/etc/ssl/certs", *(name for name in PIP.get("PIP_FIND_LINKS", "").split() if Path(name).is_dir())]
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
INSIDE = """set -e
root=$1; shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"; mount --bind -o ro "$1" "$root$1"; shift
done
shift
exec chroot "$@"
"""


class Step(NamedTuple):
    """One instruction of a Dockerfile."""

    word: str
    rest: str


class Failure(Exception):
    """A step has failed or is not supported."""


def parsed(dockerfile: str) -> list[Step]:
    lines = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    return [Step(*line.strip().split(maxsplit=1)) for line in lines if line.strip()]


def leading_to_the_last(steps: list[Step], variant: str) -> tuple[str, list[Step]]:
    """Returns the base image of a variant, and the steps of all its stages, up to the last stage."""
    stages: dict[str, tuple[str, list[Step]]] = {}
    name = ""
    for step in steps:
        if step.word == "FROM":
            base, _, name = Template(step.rest).safe_substitute(VARIANT=variant).partition(" AS ")
            stages[name] = (base, [])
        elif stages:
            stages[name][1].append(step)
        elif step.word != "ARG":
            raise Failure(f"{step.word} before the first FROM")
    found: list[Step] = []
    while name in stages:
        name, own = stages[name]
        found = own + found
    return name, found


def is_ignored(path: PurePosixPath, patterns: list[str]) -> bool:
    """Returns True if the build context excludes the path; the last matching pattern decides."""
    places = [str(place) for place in (path, *path.parents)]
    fitting = [one for one in patterns if any(fnmatch(place, one.removeprefix("!")) for place in places)]
    return bool(fitting) and not fitting[-1].startswith("!")


class CleanRoot:
    """A Debian root folder, with the environment set by its steps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": PATH}
        self.folder = PurePosixPath("/")
        self.user = "0"

    def begin(self, image: str) -> None:
        """Creates the root for an image name such as `python:3.11-slim-bookworm`, which contains the Python and Debian
        versions.
        """
        version, _, suite = image.partition("@")[0].removeprefix("python:").split("-")
        made = ["debootstrap", "--variant=minbase", "--include=ca-certificates,python3-venv", suite, str(self.root)]
        subprocess.run(["unshare", "--mount", *made], check=True)
        self.run(f"python{version}", "-m", "venv", "/usr/local")

    def run(self, *command: str) -> None:
        users = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        (home,) = [user[5] for user in users if user[2] == self.user]
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh", str(self.root)]
        inside = [f"--userspec={self.user}", str(self.root), "env", f"--chdir={self.folder}", *command]
        env = {"HOME": home, **PIP, **self.env}
        code = subprocess.run([*apart, *READABLE, "--", *inside], env=env, check=False).returncode
        if code:
            raise Failure(f"exit status {code}")

    def copy(self, sources: list[str], target: str) -> None:
        ignore = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
        patterns = [line for line in ignore if line and not line.startswith("#")]
        place = self.place(self.folder / target)

        def left_out(folder: str, names: list[str]) -> list[str]:
            here = PurePosixPath(Path(folder).relative_to(CONTEXT))
            return [name for name in names if is_ignored(here / name, patterns)]

        for source in sources:
            if is_ignored(PurePosixPath(source), patterns) or not (CONTEXT / source).exists():
                raise Failure(f"{source} is missing from the build context; check Dockerfile.dockerignore")
            if (CONTEXT / source).is_dir():
                shutil.copytree(CONTEXT / source, place, ignore=left_out, dirs_exist_ok=True)
            else:
                shutil.copy(CONTEXT / source, place)

    def place(self, path: PurePosixPath) -> Path:
        """Returns the host path of a path in the root."""
        return self.root / path.relative_to("/")

    def take(self, step: Step) -> None:
        match step.word:
            case "RUN":
                self.run("/bin/sh", "-c", step.rest)
            case "CMD":
                self.run(*json.loads(step.rest))
            case "COPY" if not step.rest.startswith("--"):
                *sources, target = step.rest.split()
                self.copy(sources, target)
            case "ENV":
                pairs = shlex.split(Template(step.rest).safe_substitute(self.env))
                self.env |= dict(pair.split("=", 1) for pair in pairs)
            case "WORKDIR":
                self.folder /= step.rest
                self.place(self.folder).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = step.rest
            case _:
                raise Failure("unsupported instruction; add it to CleanRoot.take")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the Dockerfile's steps in an empty Debian root.")
    parser.add_argument("variant", choices=["cpu", "gpu", "vllm"])
    parser.add_argument("--keep", type=Path, help="folder for the root, which is kept; default: a temporary folder")
    asked = parser.parse_args()
    image, steps = leading_to_the_last(parsed((IMAGES / "Dockerfile").read_text()), asked.variant)
    with TemporaryDirectory(prefix="clean-root-") as folder:
        clean = CleanRoot(asked.keep or Path(folder) / "root")
        clean.begin(image)
        for number, step in enumerate(steps, start=1):
            print(f"[{number}/{len(steps)}] {step.word} {step.rest}", flush=True)
            try:
                clean.take(step)
            except Failure as failure:
                sys.exit(f"step {number} of {len(steps)} failed: {step.word} {step.rest}: {failure}")
    print(f"all {len(steps)} steps of {asked.variant} succeeded, including the image's command")


if __name__ == "__main__":
    main()
