"""The demo's data, installed with the package: configuration, draft model, bench prompts and training examples.

`replay.jsonl` holds general dialogues with the demo's target, as token ids. They prevent forgetting when the draft
learns from traffic. `examples/distillation/replay.py` writes the file. `support.py` and `sql.py`
generate traffic to learn from.
"""

from importlib import resources
from pathlib import Path

FOLDER = Path(str(resources.files(__name__)))
CONFIG = FOLDER / "smollm2.yaml"
BENCH_PROMPTS = FOLDER / "bench_prompts.jsonl"
REPLAY = FOLDER / "replay.jsonl"
