"""The demo's data, installed with the package: configuration, draft model, prompts of the bench, and examples.

`replay.jsonl` holds general dialogues of the demo's target, as token ids, that keep its draft from forgetting while it
learns from traffic; `examples/distillation/replay.py` writes it. `support.py` makes traffic to learn from.
"""

from importlib import resources
from pathlib import Path

FOLDER = Path(str(resources.files(__name__)))
CONFIG = FOLDER / "smollm2.yaml"
BENCH_PROMPTS = FOLDER / "bench_prompts.jsonl"
REPLAY = FOLDER / "replay.jsonl"
