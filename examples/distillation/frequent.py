"""Selects a draft's vocabulary: the most frequent tokens in the target's text and predictions.

In a small model, the LM head over a large vocabulary dominates the cost of a token. The engine reads the file from the
draft's folder and computes only these rows of the LM head; the target still verifies over its whole vocabulary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from chunks import read_chunk


def count_tokens(paths: list[Path], vocabulary: int) -> np.ndarray:
    """Counts each token's occurrences in the text and among the target's top predictions."""
    counts = np.zeros(vocabulary, np.int64)
    for path in paths:
        for example in read_chunk(path):
            counts += np.bincount(example.tokens, minlength=vocabulary)
            counts += np.bincount(example.top_ids[:, 0], minlength=vocabulary)
    return counts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("draft", type=Path, help="the draft's folder, also for the output")
    parser.add_argument("data", type=Path, nargs="+", help="folders with chunk files")
    parser.add_argument("--tokens", type=int, default=12_288, help="number of tokens to keep")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    vocabulary = int(json.loads((arguments.draft / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    counts = count_tokens([path for folder in arguments.data for path in sorted(folder.glob("*.npz"))], vocabulary)
    kept = np.argsort(-counts, kind="stable")[: arguments.tokens]
    (arguments.draft / "frequent_tokens.json").write_text(
        json.dumps(kept.tolist(), separators=(",", ":")), encoding="utf-8"
    )
    print(f"{len(kept)} tokens: {counts[kept].sum() / counts.sum():.2%} of all occurrences")


if __name__ == "__main__":
    main()
