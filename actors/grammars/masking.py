"""The grammar of a session as a logits processor, in a target and in a drafter alike."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from actors.grammars.matcher import TextGrammar

_BITS = 8


class GrammarMasking:
    """Leaves the tokens that a session's grammar allows.

    The grammar may still be being compiled when this is made; the first row waits for it. Where other processors have
    left nothing that the grammar allows, all that it allows is equally likely: a text is never anything else.
    """

    def __init__(self, compiled: Callable[[], TextGrammar]) -> None:
        """`compiled` gives the grammar from its beginning."""
        self._compiled = compiled

    @cached_property
    def _grammar(self) -> TextGrammar:
        return self._compiled()

    def advance(self, tokens: Sequence[int]) -> None:
        self._grammar.advance(tokens)

    def apply(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> None:
        masks = self._grammar.masks(paths)
        allowed = unpacked(masks, logits)
        is_left = (allowed & ~logits.isneginf()).any(dim=-1, keepdim=True)
        logits.copy_(torch.where(is_left, logits, 0.0).masked_fill(~allowed, -torch.inf))


def unpacked(masks: Sequence[bytes | None], logits: Tensor) -> Tensor:
    """Whether each token is allowed, like `logits`, (rows, vocabulary); all of them in a row without a mask.

    The bits go to the device, which is a thirty-second of what the logits themselves have.
    """
    width = -(-logits.shape[-1] // _BITS)
    rows = [np.full(width, 0xFF, np.uint8) if m is None else np.frombuffer(m, np.uint8, width) for m in masks]
    bits = torch.from_numpy(np.stack(rows)).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[-1]].bool()
