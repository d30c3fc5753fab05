"""Open messages for tests of logits processors."""

from dataclasses import replace
from typing import Any

from protos.messages import Acceptance, Open, Sampling

_OPEN = Open("s", 1, (0,), 1, 1000, (), Sampling(), 0, 0, 0, Acceptance.COUPLED, 4)


def opened(sampling: Sampling | None = None, prompt: tuple[int, ...] = (0,), **changes: Any) -> Open:
    return replace(_OPEN, tokens=prompt, prompt_len=len(prompt), sampling=sampling or Sampling(), **changes)
