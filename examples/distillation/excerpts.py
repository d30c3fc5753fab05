"""Extracts passages, sentences, code and words for training prompts from the target's earlier answers.

A few dozen invented sentences would teach the draft only those sentences. A hundred thousand tokens of dialogue contain
thousands of paragraphs as varied as real traffic, which prompts can ask to summarize, rewrite, correct or explain.
Reads chunk files or token files, and writes a JSON file of fillers for `generate.py --excerpts`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from chunks import read_chunk
from target import ChatFrame, TargetSource
from transformers import PreTrainedTokenizerBase

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_CODE = re.compile(r"```\w*\n.*?```", re.DOTALL)
_WORD = re.compile(r"(?<![\w'])[a-z]{4,12}(?![\w'])")
_SWAPS = {"is": "are", "are": "is", "was": "were", "has": "have", "have": "has", "were": "was", "their": "there"} | {
    "your": "you're", "it's": "its", "its": "it's", "a": "an", "than": "then", "does": "do", "too": "to"
}  # fmt: skip
_DROPPED = frozenset({"a", "an", "the", "to", "of", "is", "are", "that"})


def token_rows(path: Path) -> list[np.ndarray]:
    """Reads the sequences of a chunk file, or of a file with an array `tokens` [sequences, length]."""
    with np.load(path) as file:
        if "lengths" not in file:
            return list(file["tokens"].astype(np.int64))
    return [example.tokens for example in read_chunk(path)]


def answers(rows: Iterable[np.ndarray], tokenizer: PreTrainedTokenizerBase, frame: ChatFrame) -> Iterator[str]:
    """Yields the assistant's messages of each row."""
    opening = tokenizer.decode(frame.after_user)
    end = opening.partition("\n")[0]
    for row in rows:
        for turn in tokenizer.decode(row).split(opening)[1:]:
            yield turn.partition(end)[0].strip()


def paragraphs(answer: str, shortest: int, longest: int) -> Iterator[str]:
    """Yields prose paragraphs of at least two whole sentences; `shortest` and `longest` count words."""
    for text in _CODE.sub("\n\n", answer).split("\n\n"):
        sentences = [s for s in _SENTENCE_END.split(text.replace("\n", " ").strip()) if s]
        if sentences and sentences[-1][-1:] not in '.!?"':
            sentences.pop()
        while sentences and len(" ".join(sentences).split()) > longest:
            sentences.pop()
        paragraph = " ".join(sentences)
        if len(sentences) > 1 and len(paragraph.split()) >= shortest and not re.match(r"[\d*#\-`]", paragraph):
            yield paragraph


def sentences_of(paragraph: str) -> Iterator[str]:
    yield from (s for s in _SENTENCE_END.split(paragraph) if 5 <= len(s.split()) <= 32 and "\n" not in s)


def with_mistakes(sentence: str, rng: random.Random) -> str:
    """Adds random spelling and grammar mistakes to a sentence."""
    words = []
    for word in sentence.split():
        chance = rng.random()
        if word.lower() in _SWAPS and chance < 0.5:
            words.append(_SWAPS[word.lower()])
        elif word in _DROPPED and chance < 0.3:
            continue
        elif len(word) > 4 and word.isalpha() and chance < 0.15:
            words.append(misspell(word, rng))
        elif len(word) > 4 and word.endswith("s") and chance < 0.4:
            words.append(word[:-1])
        elif word.endswith("ed") and chance < 0.4:
            words.append(word[:-2])
        else:
            words.append(word.replace(",", "") if chance < 0.3 else word)
    text = " ".join(words)
    return text[:1].lower() + text[1:].rstrip(".") if rng.random() < 0.3 else text


def misspell(word: str, rng: random.Random) -> str:
    """Drops, doubles or swaps one letter of a word."""
    at = rng.randrange(1, len(word) - 2)
    replacements = (word[at + 1], word[at] * 2 + word[at + 1], word[at + 1] + word[at])
    return word[:at] + rng.choice(replacements) + word[at + 2 :]


def fillers(texts: Iterable[str], rng: random.Random) -> dict[str, list[str]]:
    """Returns template variables by name."""
    passages = list[str]()
    code = list[str]()
    words = Counter[str]()
    for text in texts:
        passages.extend(paragraphs(text, 25, 80))
        code.extend(block for block in _CODE.findall(text) if 40 < len(block) < 380 and block[3] != "\n")
        words.update(set(_WORD.findall(text)))
    passages = sorted(set(passages))
    code = sorted(set(code))
    lines = sorted({line for passage in passages for line in sentences_of(passage)})
    rng.shuffle(lines)
    return {
        "excerpt": passages,
        "line": lines,
        "faulty_line": [with_mistakes(line, rng) for line in lines],
        "code_excerpt": code,
        "word": sorted(word for word, count in words.items() if count >= 2),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id, for the tokenizer and chat template")
    parser.add_argument("out", type=Path, help="JSON file of fillers")
    parser.add_argument("tokens", type=Path, nargs="+", help="`.npz` files: chunks, or files with an array `tokens`")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tokenizer = TargetSource(arguments.target, arguments.gguf_file).load_tokenizer()
    frame = ChatFrame.of(tokenizer)
    rows = (row for path in arguments.tokens for row in token_rows(path))
    found = fillers(answers(rows, tokenizer, frame), random.Random(arguments.seed))
    arguments.out.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    print(", ".join(f"{len(texts)} x {name}" for name, texts in found.items()))


if __name__ == "__main__":
    main()
