"""Generates replay examples with the target: general dialogues that prevent forgetting while a draft learns.

    python replay.py TARGET OUT.jsonl [--count 300] [--tokens 96] [--exclude PROMPTS.jsonl]

A line of OUT is {"prompt": [token ids], "answer": [token ids]}, the format of `draft.learning.replay` and `slipstream
learn run --replay`. Prompts come from `training_prompts.yaml`. `--exclude` skips evaluation prompts, so they stay
unseen.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from prompts import DEFAULT_PROMPTS, PromptSource
from rich.console import Console
from rich.progress import Progress

from actors.learning.conversations import answered, chat_prompt, write_examples
from actors.models.checkpoint import load_model, local_folder
from actors.models.tokenizer_reader import end_ids, load_tokenizer


def read_excluded(paths: list[Path]) -> set[str]:
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {json.loads(line)["prompt"] for line in lines}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("out", type=Path, help="file to write, JSON lines")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="templates and fillers, YAML")
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="JSON lines of prompts to skip")
    parser.add_argument("--count", type=int, default=300, help="number of dialogues")
    parser.add_argument("--tokens", type=int, default=96, help="maximum tokens per answer")
    parser.add_argument("--batch", type=int, default=32, help="dialogues per batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    folder = local_folder(arguments.target)
    tokenizer = load_tokenizer(folder)
    excluded = read_excluded(arguments.exclude)
    drawn = PromptSource.load(arguments.prompts).stream(arguments.seed)
    texts = islice((p.text for p in drawn if not p.is_open and p.text not in excluded), arguments.count)
    prompts = [chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    model = load_model(folder, "float32", torch.device("cpu"))
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("dialogues", total=len(prompts))
        found = answered(
            model,
            prompts,
            end_ids(folder),
            arguments.tokens,
            batch=arguments.batch,
            advance=lambda count: progress.advance(task, count),
        )
    write_examples(arguments.out, found)
    print(f"{len(found)} dialogues, {sum(len(each.answer) for each in found)} tokens of answers in {arguments.out}")


if __name__ == "__main__":
    main()
