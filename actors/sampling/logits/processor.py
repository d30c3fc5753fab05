"""The seam for whatever changes logits by the text before them: penalties, biases, masks, grammars.

A processed row of logits is a function of the request, of the text before the row, and of the model's own row. It is
so for every row of a step, on every path of a draft tree, and for a row of a drafter: then coupled sampling gives the
same tokens with speculation and without, and the ratio rule the same distribution.

**One processor serves one session in one process.** It has two kinds of knowledge:

* the decided text, which only grows: `advance` tells it of each generated token once, in order;
* a path of tokens after that, which holds for one row alone: `apply` gets one path for each row.

A processor with a state of its own, such as the matcher of a grammar, moves it forward in `advance` for good. In
`apply` it forks, or moves along a path and rolls back: after `apply` it must be where it was. Paths of a block come
such that each path's parent is before it, and mostly right before it, so that a state that rolls back to the common
beginning of two successive paths takes few steps. The same path may come in later calls again, or never.

A path may hold tokens that the processor itself forbids, for drafters need not know of it. What comes after such a
token can never be decided, so its row may be left as it is; it must neither fail nor change another row. The same holds
after a stop id.

In a target, `advance` is called between steps and `apply` once or more a step, by the leading rank alone, beside the
logits. In a drafter, the decided text is what the drafter knows of, and a path is what it drafts after that, guessed
verdicts included. Sessions whose processors are absent never come here.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from protos.draft_tree import DraftTree
from protos.messages import Open

Path = tuple[int, ...]
"""Tokens that follow the decided text."""


class LogitsProcessor(Protocol):
    """One session's change of its logits."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These generated tokens were decided after those told before; never the prompt, which the Open holds."""
        ...

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Changes `logits` in place: float32, (rows, vocabulary), on the model's device, one row for each path.

        A forbidden token is set to -inf. It must not wait for the device: what it needs there goes by `to_device`.
        """
        ...


Maker = Callable[[Open], LogitsProcessor | None]
"""Makes a session's processor of one kind; None for a request that asks for nothing of the kind.

The Open may hold generated tokens already: they come by `advance`.
"""


class ProcessorChain:
    """All processors of one session, in order."""

    def __init__(self, request: Open, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._length = request.prompt_len  # of the text that they know

    def follow(self, text: Sequence[int], length: int | None = None) -> None:
        """The text, prompt included, is decided up to `length`, or as a whole."""
        end = len(text) if length is None else length
        assert end >= self._length, "what was decided is never taken back"
        self.advance(text[self._length : end])

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were decided after those that they know."""
        if tokens:
            for processor in self._processors:
                processor.advance(tokens)
            self._length += len(tokens)

    @property
    def length(self) -> int:
        """Of the text that they know, prompt included."""
        return self._length

    def path(self, text: Sequence[int]) -> Path:
        """What of a longer text comes after the decided one."""
        return tuple(text[self._length :])

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """A processed copy in float32, (rows, vocabulary): row i is the one after the decided text and `paths[i]`."""
        assert len(logits) == len(paths), "one path for each row"
        processed = logits.to(torch.float32, copy=True)
        for processor in self._processors:
            processor.apply(processed, paths)
        return processed


def paths_of(draft: DraftTree) -> list[Path]:
    """Of the rows of a block: after the decided text, then after each node."""
    found: list[Path] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent + 1], token))
    return found
