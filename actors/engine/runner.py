"""Runs one model with one cache, with one forward over ragged rows per step, and measures step costs before serving."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from actors.attention import AttentionBackend, PaddedBackend, StepShape
from actors.attention.batch import RaggedBatch, exact_batch, never
from actors.attention.select_backend import attention_shape, choose_attention
from actors.compute.hidden_states import StateCapture
from actors.compute.kv_cache import InputRow, PagedCache
from actors.engine.static_chain import Choose, StaticChain
from actors.engine.static_step import Recording, StaticStep
from actors.models.decoder import Decoder, ForwardOutput, decoder_for
from actors.models.reference_check import check_class
from actors.sampling.draws import NO_DRAWS, Draws, draw_tokens, mark_reached
from cluster.costs import ForwardCost
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy, SlotMove

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Moves slots, copies pages, feeds rows, and draws tokens; returns logits at the requested positions, if needed.

    The number of positions is the sum of the rows' `logits`. `draws` numbers them.
    """

    vocabulary: int

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        *,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        """Returns logits and, if the runner draws, tokens and accepted positions. The next forward may overwrite both.

        Without `draws.needs_logits`, a runner that draws returns no logits.
        """
        ...

    def read_states(self, slots: Sequence[int]) -> bytes:
        """Returns the encoded hidden states at these slots. Requires a runner that captures them."""
        ...


class InterruptibleRunner(Protocol):
    """A `Runner` whose forward raises Interrupted between two layers once `interrupted` returns True."""

    vocabulary: int

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
    ) -> ForwardOutput: ...


@runtime_checkable
class ChainRunner(InterruptibleRunner, Protocol):
    """An `InterruptibleRunner` that may run chains of steps without waiting for the device."""

    def static_chain(self, choose: Choose, inputs: int, columns: int) -> StaticChain | None:
        """Returns chains whose tokens `choose` chooses, see `StaticChain`; None if steps are not captured."""
        ...


def check_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raises ModelError if the model lacks a layer or the layers are not in ascending order."""
    last = int(model.config.get_text_config().num_hidden_layers)
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= last:
        raise ModelError(
            f"cannot capture hidden states of layers {tuple(layers)}: expected ascending ids from 0 (embeddings) to"
            f" {last} (last layer of {type(model).__name__}); correct the layer ids in the draft's configuration"
        )


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """Computes this rank's logits, then draws and accepts tokens. On a GPU, this part of a forward is captured."""

    decode: Decoder
    layers: tuple[int, ...]  # layers whose residual streams are returned
    vocabulary: int | None  # number of ids that may be drawn; None if no tokens are drawn

    def __call__(self, batch: RaggedBatch) -> ForwardOutput:
        output = self.decode(batch, self.layers)
        if self.vocabulary is None:
            return output
        shard = self.decode.shard
        drawable = output.logits[:, : max(0, self.vocabulary - shard.begin)]
        tokens = draw_tokens(drawable, batch.draws, shard)
        fed = batch.tokens.index_select(0, batch.logit_at)
        reached = mark_reached(tokens, fed, batch.parents, batch.longest)
        return output._replace(drawn=torch.stack([tokens, reached.long()], dim=1))


class ModelRunner:
    """Runs a Hugging Face causal language model on texts of up to `context` tokens.

    By default, `choose_attention` selects `attention`, and `decoder_for` selects `decoder`. `capture` stores the hidden
    states of all fed tokens. `cache` may be reused from a runner of the same model shape. Raises ModelError for a model
    that cannot be proved exact; `is_checked` skips this check. The runner draws tokens if `vocabulary` is given; ids
    from there on are padding of the LM head and are never drawn. With several `ranks`, the model is one rank's share,
    and all ranks make the same forwards with the same draws. A `recording` captures the steps that fit in its buckets;
    it needs a `PaddedBackend`.
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
        cache: PagedCache | None = None,
        vocabulary: int | None = None,
        recording: Recording | None = None,
        ranks: int = 1,
    ) -> None:
        if not is_checked:
            check_class(type(model), model.config, context=context)
        if capture is not None:
            check_layers(model, capture.layers)
        shape = attention_shape(model, page_size, ranks)
        self.attention = attention or choose_attention(shape, model.device)[0]
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.cache = cache or PagedCache(pages, page_size, shape.sizes, model.dtype, model.device)
        self._decode = decoder or decoder_for(model.eval(), context=context)
        self._capture = capture
        self._step = DecodingStep(self._decode, capture.layers if capture is not None else (), vocabulary)
        self._recording = recording
        self._ranks = ranks
        self._static = None
        if recording is not None:
            assert isinstance(self.attention, PaddedBackend), f"{self.attention.name} has no padded plans"
            self._static = StaticStep(self._step, self.cache, self.attention, recording)

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        self.cache.move(moves)
        self.cache.copy(copies)
        if shape := self._captured_shape(rows, draws):
            assert self._static is not None, "steps are captured"
            written, output = self._static.run(rows, draws, shape)
        else:
            batch = exact_batch(rows, self.cache, self.attention, interrupted, draws)
            written, output = batch.written, self._step(batch)
        if self._capture is not None:
            assert output.streams is not None, "the decoder returned no streams"
            self._capture.cache.move(moves)
            self._capture.cache.copy(copies)
            self._capture.keep(written, output.streams)
        if draws.needs_logits or self._step.vocabulary is None:
            return output._replace(logits=self._decode.shard.gather(output.logits))
        return output._replace(logits=output.logits[:, :0])

    @property
    def is_captured(self) -> bool:
        """True if steps of a recording's shapes are captured: before serving, or when they first occur."""
        return self._static is not None

    @torch.inference_mode()
    def capture_steps(self) -> None:
        """Captures the steps of all shapes, if any.

        Call this before serving, because a capture takes longer than a step. Writes only to unused pages. If a capture
        fails, steps run eagerly. With several ranks, this raises ModelError instead, since the other ranks already wait
        for this one.
        """
        if self._static is None:
            return
        try:
            self._static.capture_all()
        except RuntimeError as error:
            self._run_eagerly(error)

    def _captured_shape(self, rows: Sequence[InputRow], draws: Draws) -> StepShape | None:
        """Returns the shape of a step after its capture; None if the step runs eagerly.

        After a failure, no local variable keeps the captured steps, whose memory the eager step may need.
        """
        if self._static is None:
            return None
        shape = self._static.shape(rows, draws)
        if shape is None:
            return None
        try:
            self._static.capture(shape)
        except RuntimeError as error:
            self._run_eagerly(error)
            return None
        return shape

    def _run_eagerly(self, error: RuntimeError) -> None:
        """Turns captures off after one failed. Raises ModelError if there are several ranks."""
        if self._ranks > 1:
            raise ModelError(
                f"a step cannot be captured as a CUDA graph: {error}; set target.resources_per_rank.cuda_graphs: false"
            ) from error
        log.warning("steps run without CUDA graphs, which is slower: a capture failed: %s", str(error))
        self._static = self._recording = None

    def static_chain(self, choose: Choose, inputs: int, columns: int) -> StaticChain | None:
        """Implements `ChainRunner`."""
        if self._recording is None:
            return None
        assert isinstance(self.attention, PaddedBackend), "captured steps have padded plans"
        assert self._capture is None, "chains keep no hidden states"
        return StaticChain(self._decode, choose, inputs, columns, self.cache, self.attention, self._recording)

    @torch.inference_mode()
    def read_states(self, slots: Sequence[int]) -> bytes:
        assert self._capture is not None, "no states are captured here"
        return self._capture.cache.read(slots)


SIZES = (1, 4, 6, 8, 12, 16, 32, 64)  # tokens per step; includes sizes at which CPU matrix products become slower
CONTEXT = 64  # cached tokens before the step
REPEATS = 5  # the fastest counts, since thread pools start slowly


def profile_steps(runner: Runner, page_size: int, pages: int, sessions: int) -> ForwardCost:
    """Measures forwards over one row of each size and over the same number of one-token rows; overwrites the first
    pages.

    Skips sizes that do not fit in the pages, and more rows than sessions, for which no step is captured.
    """
    sizes = [size for size in SIZES if size <= pages * page_size]
    # Rows start at a new page, since a page holds one recurrent state.
    context = min(-(-CONTEXT // page_size), (pages * page_size - sizes[-1]) // page_size) * page_size
    if context:
        runner.forward([InputRow((0,) * context, 0, 1, tuple(range(context // page_size)))])
    one_row = []
    single_tokens = []
    for size in sizes:
        # Rows may share pages, since their content does not matter.
        needed = tuple(range(-(-(context + size) // page_size)))
        one_row.append([InputRow((0,) * size, context, size, needed)])
        if size <= sessions:
            single_tokens.append([InputRow((0,), context, 1, needed)] * size)
    seconds = fastest_s([partial(_forward, runner, rows) for rows in (*one_row, *single_tokens)])
    whole = list(accumulate(seconds[: len(sizes)], max))
    apart = seconds[len(sizes) :]
    rows = [
        max(0.0, more - less) / (size - 1) for size, less, more in zip(sizes, whole, apart, strict=False) if size > 1
    ]
    per_row_s = median(rows) if rows else 0.0
    by_tokens = tuple((size, max(0.0, step_s - per_row_s)) for size, step_s in zip(sizes, whole, strict=True))
    return ForwardCost(by_tokens=by_tokens, per_row_s=per_row_s)


def _forward(runner: Runner, rows: list[InputRow]) -> None:
    output = runner.forward(rows, draws=Draws(needs_logits=False))
    drawn = output.logits.max(dim=-1).indices if output.drawn is None else output.drawn
    drawn.tolist()  # fetches the result, as a verdict does


def fastest_s(todo: Sequence[Callable[[], object]]) -> list[float]:
    """Returns each function's shortest duration, in seconds.

    The functions run alternately, so that other load affects all of them. The first repeat does not count, since it
    allocates memory and reads prompts.
    """
    turns = []
    for _ in range(1 + REPEATS):
        seconds = []
        for do in todo:
            began = time.perf_counter()
            do()
            seconds.append(time.perf_counter() - began)
        turns.append(seconds)
    return [min(times) for times in zip(*turns[1:], strict=True)]
