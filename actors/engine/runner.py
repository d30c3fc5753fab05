"""One model, one cache, one forward over ragged rows."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from actors.attention import AttentionBackend
from actors.attention.batch import RaggedBatch, never
from actors.attention.select_backend import choose_attention
from actors.attention.shape import attention_shape
from actors.compute.kv_cache import FeedRow, PagedCache
from actors.engine.capture import StateCapture
from actors.models.decoder import Decoder, decoder_for
from actors.models.forward_output import ForwardOutput
from actors.models.reference_check import check_class
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy, PlaceMove


class Runner(Protocol):
    """Moves places, copies pages and feeds rows; returns what was computed at their wanted places.

    There are as many of these as the sum of the rows' `logits`.
    """

    vocabulary: int

    def forward(
        self, rows: Sequence[FeedRow], copies: Sequence[PageCopy] = (), *, moves: Sequence[PlaceMove] = ()
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
        moves: Sequence[PlaceMove] = (),
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
