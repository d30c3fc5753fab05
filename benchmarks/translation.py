"""Measures drafts translated between two tokenizers: tokens per verification in lock step, and the cost of translation.

    python benchmarks/translation.py TARGET DRAFT [--tokenizer FOLDER] [--chat] [--prompts text template]
        [--temperatures 0 0.7 1] [--tokens 48]

Runs the prompts of `slipstream bench` as raw text, or with --chat in the target's chat template, with blocks of up to
five tokens. The draft reads them as configured by draft.prompt: the target's text, or each prompt as a conversation in
the draft's own chat template. --tokenizer is the draft's tokenizer if its folder has none. Cost is measured on texts of
1,000 tokens: a round reads three tokens and translates a block.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console

from actors.drafters.registry import create_method
from actors.drafters.translation.pairing import describe, draft_pairing
from actors.models.checkpoint import local_folder, vocabulary
from actors.models.tokenizer_reader import load_tokenizer
from cluster.config import DraftPool, ModelConfig, Resources
from cluster.drafting.method import DraftingMethod
from cluster.drafting.translation import TranslatedText, Translator
from serve_app.demo_data import BENCH_PROMPTS
from tools.bench.experiment import read_prompts
from tools.drafts.evaluation import MeasuredTarget, draft_prompts

CONTEXT = 1024
DRAFT_TOKENS = 5
LONG_TEXT = 1000  # tokens before the rounds whose cost is measured
ROUNDS = 40
COMMITTED = 3  # tokens per such round


def decode(
    target: MeasuredTarget,
    method: DraftingMethod,
    prompts: Sequence[tuple[int, ...]],
    own_prompts: Sequence[tuple[int, ...]],
    temperature: float,
    tokens: int,
) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the number of verifications, and all texts."""
    verifications = 0
    texts = []
    for index, (prompt, own) in enumerate(zip(prompts, own_prompts, strict=True)):
        generation = target.generation(index, prompt, tokens, temperature, DRAFT_TOKENS)
        generation = replace(generation, draft_prompt=own)
        committed = list(target.run(generation, method, trees=False))
        verifications += len(committed)
        texts.append(tuple(token for emit in committed for token in emit.tokens))
    return verifications, texts


def cost(translator: Translator, tokens: Sequence[int]) -> tuple[float, float]:
    """Returns the median seconds, and the mean number of ids from the tokenizers, of a round after a long text."""
    tokens = (list(tokens) * (1 + 2 * LONG_TEXT // len(tokens)))[: LONG_TEXT + (ROUNDS + 4) * COMMITTED]
    text = TranslatedText.begin(translator, 1, tokens[:LONG_TEXT])
    spelled = b"".join(map(translator.target.piece, tokens[LONG_TEXT:])).decode(errors="ignore")
    drafted = translator.draft.encode(spelled)
    seconds = []
    translator.encoded = 0
    for index in range(ROUNDS):
        block = drafted[index * COMMITTED :][:DRAFT_TOKENS]
        began = perf_counter()
        text.extend(tokens[LONG_TEXT + index * COMMITTED :][:COMMITTED])
        text.translated(block)
        seconds.append(perf_counter() - began)
    return median(seconds), translator.encoded / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or Hugging Face id")
    parser.add_argument("draft", help="folder or Hugging Face id")
    parser.add_argument("--tokenizer", help="folder or Hugging Face id of the draft's tokenizer")
    parser.add_argument("--chat", action="store_true", help="use the target's chat template")
    parser.add_argument("--prompts", nargs="+", default=["text"], choices=["text", "template"], help="draft.prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    folder = local_folder(arguments.target)
    target = MeasuredTarget(ModelConfig(target=arguments.target, dtype=arguments.dtype), Resources(), CONTEXT)
    draft = DraftPool(method="draft_model", model=arguments.draft, tokenizer=arguments.tokenizer)
    pairing = draft_pairing(draft, vocabulary(folder))
    console.print(describe(pairing, folder))
    method = create_method(draft, target.setup(draft, DRAFT_TOKENS))
    tokenizer = load_tokenizer(folder)
    asked = [each.prompt for each in read_prompts(BENCH_PROMPTS)]
    prompts = [target.prompt(text) if arguments.chat else tuple(tokenizer(text)["input_ids"]) for text in asked]
    found: dict[str, float] = {}
    for temperature, form in product(arguments.temperatures, arguments.prompts):
        own = draft_prompts(draft.model_copy(update={"prompt": form}), asked)
        verifications, texts = decode(target, method, prompts, own, temperature, arguments.tokens)
        name = f"{form} {temperature:g}"
        found[name] = sum(map(len, texts)) / verifications
        console.print(f"prompt and temperature {name}: {found[name]:.2f} tokens a verification")
    if pairing.is_translated:
        read = [token for prompt, text in zip(prompts, texts, strict=True) for token in (*prompt, *text)]
        seconds, ids = cost(pairing.translator(folder), read)
        console.print(f"translation: {1000 * seconds:.3f} ms and {ids:.1f} ids a round after {LONG_TEXT} tokens")
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
