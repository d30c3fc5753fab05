"""Draws training prompts at random from templates and fillers, without repetition.

The templates and fillers are data (`training_prompts.yaml`). A prompt is either complete or *open*: the template of an
open prompt ends in `{...}`, and the target writes the rest of the user's turn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

DEFAULT_PROMPTS = Path(__file__).with_name("training_prompts.yaml")
OPEN_END = "{...}"
_FIELD = re.compile(r"\{(?:(\d+)\.\.(\d+)|([a-z_]+))\}")


@dataclass(frozen=True)
class Prompt:
    """Complete or partial user turn."""

    kind: str
    text: str
    is_open: bool  # the target completes the turn


@dataclass(frozen=True)
class PromptSource:
    """Templates by kind, and possible values of their fields."""

    weights: dict[str, float]
    templates: dict[str, list[str]]
    fillers: dict[str, list[str]]
    excerpts: dict[str, list[str]] = field(default_factory=dict)  # fillers without nested fields

    @classmethod
    def load(cls, path: Path = DEFAULT_PROMPTS, excerpts: Path | None = None) -> PromptSource:
        """Loads the templates and fillers of `path`; skips templates that need missing excerpts."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = json.loads(excerpts.read_text(encoding="utf-8")) if excerpts else {}
        missing = set(document["excerpts"]) - found.keys()
        templates = {
            kind: [t for t in texts if missing.isdisjoint(name for _, _, name in _FIELD.findall(t))]
            for kind, texts in document["kinds"].items()
        }
        source = cls(document["weights"], templates, document["fillers"], found)
        source._check()
        return source

    def draw(self, rng: random.Random) -> Prompt:
        """Draws a kind by weight, and a prompt of that kind."""
        kind = rng.choices(list(self.weights), weights=list(self.weights.values()))[0]
        template = rng.choice(self.templates[kind])
        body = template.removesuffix(OPEN_END)
        is_open = body != template
        text = self._fill(body, rng).replace("{{", "{").replace("}}", "}")
        return Prompt(kind, text.rstrip(" ") if is_open else text, is_open)

    def stream(self, seed: int) -> Iterator[Prompt]:
        """Yields prompts without end; never repeats a complete prompt."""
        rng = random.Random(seed)
        seen: set[str] = set()
        while True:
            prompt = self.draw(rng)
            if prompt.is_open or prompt.text not in seen:
                seen.add(prompt.text)
                yield prompt

    def _fill(self, text: str, rng: random.Random) -> str:
        def replace(match: re.Match[str]) -> str:
            low, high, name = match.groups()
            if name is None:
                return str(rng.randint(int(low), int(high)))
            if name in self.excerpts:
                return rng.choice(self.excerpts[name]).replace("{", "{{").replace("}", "}}")
            return self._fill(str(rng.choice(self.fillers[name])), rng)

        return _FIELD.sub(replace, text)

    def _check(self) -> None:
        texts = [t for group in (*self.templates.values(), *self.fillers.values()) for t in group]
        names = {m.group(3) for t in texts for m in _FIELD.finditer(str(t)) if m.group(3)}
        unknown = names - self.fillers.keys() - self.excerpts.keys()
        if unknown or self.weights.keys() != self.templates.keys():
            raise ValueError(f"unknown fields {sorted(unknown)}, or weights unlike kinds; add the fillers or weights")
