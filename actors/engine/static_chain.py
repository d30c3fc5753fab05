"""Several decoding steps as one captured function: each feeds the tokens chosen on the device after the step before.

Positions, slots and pages of a chain are known in advance, and the choice of a token is a function of tensors. So the
host packs all steps at once, launches one graph, and waits for the device once, for the results of all steps.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from actors.attention import PaddedBackend, StepShape
from actors.attention.batch import PackedChain
from actors.compute.input_row import Integers
from actors.compute.kv_cache import InputRow, PagedCache
from actors.engine.static_step import Recording, Step, StepBuffer

Choose = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Chooses a token per row, without reading values on the host.

Logits (rows, columns), float32, and int64 inputs (rows,) -> tokens (rows,), and values for the host, (rows, values).
"""

ROWS = (1, 4, 16, 64)  # rows of captured chains; a small model takes hardly longer for three padding rows
MAX_TOKENS = 8  # tokens per row of the longest captured chain


def row_sizes(rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows of the captured chains that serve up to `rows` rows."""
    return ROWS[: bisect_left(ROWS, rows) + 1]


def captured_steps(tokens: int, rows: int) -> int:
    """Returns the number of steps in all captured chains of up to `tokens` tokens and `rows` rows."""
    longest = min(tokens, MAX_TOKENS)
    return len(row_sizes(rows)) * longest * (longest + 1) // 2


class _Captured(NamedTuple):
    buffer: StepBuffer
    repeat: Callable[[], Tensor]


class StaticChain:
    """Runs chains of steps with one token per row, after capturing each combination of rows and tokens.

    `choose` takes `inputs` numbers per token. Logits have `columns` columns.
    """

    @torch.inference_mode()
    def __init__(
        self,
        step: Step,
        choose: Choose,
        inputs: int,
        columns: int,
        cache: PagedCache,
        backend: PaddedBackend,
        recording: Recording,
    ) -> None:
        self._step = step
        self._choose = choose
        self._inputs = inputs
        self._cache = cache
        self._backend = backend
        self._capture = recording.capture
        self._pages = recording.buckets.pages
        self._sizes = row_sizes(recording.buckets.rows)
        # Logits before the first choice. All chains read the first rows of this buffer.
        self._logits = torch.zeros((self._sizes[-1], columns), dtype=torch.float32, device=cache.device)
        self._captured: dict[tuple[int, int], _Captured] = {}  # by numbers of rows and tokens

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    @torch.inference_mode()
    def run(self, rows: Sequence[InputRow], logits: Tensor, inputs: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Chooses tokens for each row, and feeds them at the rows' slots; waits for the device.

        The chain must be captured. `logits`, (rows, columns), precede the first choice. `inputs` lists the inputs of
        each token, by row. A row's own tokens are ignored: the first chosen token is fed at its first slot, and so on.
        Its values are undefined from the second token on that it has no slot for. Returns the values of all choices on
        the host, (tokens, rows, values).
        """
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        at = (size, len(inputs))
        self._captured[at].buffer.write(self._integers(self._packed(rows, *at), inputs, size))
        self._logits[: len(rows)].copy_(logits)
        return self._captured[at].repeat()[:, : len(rows)].to("cpu", copy=True)

    @torch.inference_mode()
    def capture(self, rows: int, tokens: int) -> None:
        """Captures the chain for these numbers of rows and tokens, up to MAX_TOKENS, unless it is captured already.

        Overwrites no page. Raises RuntimeError if this fails.
        """
        at = (self._sizes[bisect_left(self._sizes, rows)], tokens)
        if at not in self._captured:
            self._captured[at] = self._captured_chain(*at)

    def capture_all(self, tokens: int, rows: int) -> None:
        """Captures all chains of up to `tokens` tokens and `rows` rows before serving, as `capture` does."""
        for size in reversed(row_sizes(min(rows, self.max_rows))):
            for count in range(min(tokens, MAX_TOKENS), 0, -1):
                self.capture(size, count)

    def _packed(self, rows: Sequence[InputRow], size: int, tokens: int) -> PackedChain:
        return PackedChain.padded(
            rows, tokens - 1, self._cache, self._backend, StepShape(size, size, self._pages, size, 0)
        )

    def _integers(
        self, packed: PackedChain, inputs: Sequence[Sequence[Sequence[int]]], size: int
    ) -> list[Sequence[int] | Integers]:
        """Returns the choices' inputs, padded with zeros, then the integers of the steps."""
        padded = [[*part, *[0] * (size - len(part))] for part in chain.from_iterable(inputs)]
        return [*padded, *packed.integers]

    def _captured_chain(self, size: int, tokens: int) -> _Captured:
        """Captures a chain on padding, which leaves all pages as they are."""
        packed = self._packed((), size, tokens)
        integers = self._integers(packed, [[()] * self._inputs] * tokens, size)
        buffer = StepBuffer([len(part) for part in integers], self._cache.device)
        buffer.write(integers)
        split = tokens * self._inputs
        inputs = [buffer.parts[begin : begin + self._inputs] for begin in range(0, split, self._inputs)]
        steps, shared = packed.split(buffer.parts[split:])
        compute, choose, logits = self._step, self._choose, self._logits[:size]  # see `StaticStep`

        def run() -> Tensor:
            chosen, values = choose(logits, inputs[0])
            found = [values]
            for places, each in zip(steps, inputs[1:], strict=True):
                batch = packed.batch(chosen, places, shared)
                batch.place()
                chosen, values = choose(compute(batch).logits.float(), each)
                found.append(values)
            return torch.stack(found)

        return _Captured(buffer, self._capture(run))
