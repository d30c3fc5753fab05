"""The demo's data, installed with the package: its config, its draft model, and the prompts of the bench."""

from importlib import resources
from pathlib import Path

FOLDER = Path(str(resources.files(__name__)))
CONFIG = FOLDER / "smollm2.yaml"
BENCH_PROMPTS = FOLDER / "bench_prompts.jsonl"
