"""One model, one cache, one forward over ragged rows.

What a target's steps cost on this machine, measured once before it serves.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Protocol

import torch
from transformers import PreTrainedModel

from actors.attention import AttentionBackend
from actors.attention.batch import RaggedBatch, never
from actors.attention.select_backend import attention_shape, choose_attention
from actors.compute.hidden_states import StateCapture
from actors.compute.kv_cache import FeedRow, PagedCache
from actors.models.decoder import Decoder, ForwardOutput, decoder_for
from actors.models.reference_check import check_class
from cluster.costs import ForwardCost
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy, SlotMove


class Runner(Protocol):
    """Moves places, copies pages and feeds rows; returns what was computed at their wanted places.

    There are as many of these as the sum of the rows' `logits`.
    """

    vocabulary: int

    def forward(
        self, rows: Sequence[FeedRow], copies: Sequence[PageCopy] = (), *, moves: Sequence[SlotMove] = ()
    ) -> ForwardOutput: ...

    def read_states(self, places: Sequence[int]) -> bytes:
        """The encoded hidden states at places of the pages, of a runner that captures them."""
        ...


class InterruptibleRunner(Protocol):
    """A `Runner` that gives a forward up between two layers, by raising Interrupted, when `interrupted` says so."""

    vocabulary: int

    def forward(
        self,
        rows: Sequence[FeedRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
    ) -> ForwardOutput: ...


def check_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raises ModelError for layers that the model has not got, and for those that do not rise."""
    last = int(model.config.get_text_config().num_hidden_layers)
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= last:
        raise ModelError(
            f"hidden states of layers {tuple(layers)} are asked for, expected rising numbers from 0, the embeddings, to"
            f" {last}, the last layer of {type(model).__name__}; see where the draft's configuration numbers layers"
        )


class ModelRunner:
    """Runs a Hugging Face causal language model, for texts of up to `context` tokens.

    `choose_attention` chooses `attention` and `decoder_for` the `decoder` where none is given. With `capture` it keeps
    the hidden states of all that it is fed. Raises ModelError for a model that cannot be proved right, unless its class
    and config were checked before (`is_checked`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pages: int,
        page_size: int,
        attention: AttentionBackend | None = None,
        decoder: Decoder | None = None,
        capture: StateCapture | None = None,
        context: int | None = None,
        is_checked: bool = False,
    ) -> None:
        if not is_checked:
            check_class(type(model), model.config, context=context)
        if capture is not None:
            check_layers(model, capture.layers)
        self._attention = attention or choose_attention(attention_shape(model, page_size), model.device)[0]
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._cache = PagedCache(pages, page_size, model.dtype, model.device)
        self._decode = decoder or decoder_for(model.eval(), context=context)
        self._capture = capture

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[FeedRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
    ) -> ForwardOutput:
        self._cache.move(moves)
        self._cache.copy(copies)
        batch = RaggedBatch(rows, self._cache, self._attention, interrupted)
        if self._capture is None:
            return self._decode(batch)
        self._capture.cache.move(moves)
        self._capture.cache.copy(copies)
        output = self._decode(batch, self._capture.layers)
        assert output.streams is not None, "a decoder gives the streams that it is asked for"
        self._capture.keep(batch.written, output.streams)
        return output

    @torch.inference_mode()
    def read_states(self, places: Sequence[int]) -> bytes:
        assert self._capture is not None, "no states are captured here"
        return self._capture.cache.read(places)


SIZES = (1, 4, 6, 8, 12, 16, 32, 64)  # tokens of a step; a processor's products have steps at some of them
CONTEXT = 64  # tokens before them
REPEATS = 5  # turns, of which the fastest counts: when a pool starts, much else does too


def profile_steps(runner: Runner, page_size: int, pages: int) -> ForwardCost:
    """Forwards over one row of so many tokens, and over so many rows of one; overwrites the cache's first pages.

    Sizes that the pages have no room for are left out.
    """
    sizes = [size for size in SIZES if size <= pages * page_size]
    one_row = []
    single_tokens = []
    for size in sizes:
        start = min(CONTEXT, pages * page_size - size)
        # Rows may share pages here: what they read and write does not matter.
        needed = tuple(range(-(-(start + size) // page_size)))
        one_row.append([FeedRow((0,) * size, start, size, needed)])
        single_tokens.append([FeedRow((0,), start, 1, needed)] * size)
    seconds = least_seconds([partial(_forward, runner, rows) for rows in (*one_row, *single_tokens)])
    whole = list(accumulate(seconds[: len(sizes)], max))
    apart = seconds[len(sizes) :]
    rows = [
        max(0.0, more - less) / (size - 1) for size, less, more in zip(sizes, whole, apart, strict=True) if size > 1
    ]
    per_row_s = median(rows) if rows else 0.0
    by_tokens = tuple((size, max(0.0, taken - per_row_s)) for size, taken in zip(sizes, whole, strict=True))
    return ForwardCost(by_tokens=by_tokens, per_row_s=per_row_s)


def _forward(runner: Runner, rows: list[FeedRow]) -> None:
    runner.forward(rows).logits.max(dim=-1).indices.tolist()  # the result is fetched, as a verdict needs it


def least_seconds(todo: Sequence[Callable[[], object]]) -> list[float]:
    """The least seconds of each of several things.

    They take turns, so that whatever else a machine is at does not fall on one of them alone; the first turn, in which
    memory is allocated and prompts are read, does not count.
    """
    turns = []
    for _ in range(1 + REPEATS):
        seconds = []
        for do in todo:
            began = time.perf_counter()
            do()
            seconds.append(time.perf_counter() - began)
        turns.append(seconds)
    return [min(found) for found in zip(*turns[1:], strict=True)]
