"""Selects the fastest correct attention backend for a model and device, by measurements at start.

A backend is correct if it agrees with `sdpa_gather`, even if the memory of other rows holds NaN. `attention_shape`
derives the sizes of attention and cache from a model's config.
"""

import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import restore_flash_attention_impl
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention import AttentionBackend, AttentionPlan, PaddedBackend, ScoreOptions, StepShape
from actors.attention.batch import PackedStep, RaggedBatch, exact_batch
from actors.attention.flashinfer import flashinfer_for
from actors.attention.flat_rows import FlatRows
from actors.attention.paged import paged_for
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.varlen import varlen_for
from actors.compute.capture import Capture, CudaCapture
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache, to_device
from actors.sampling.draws import NO_DRAWS

GATHERED = "colwise_gather_output"  # style in transformers' tensor-parallel plans: ranks gather their projections
# Layer types with attention.
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
SINKS = ".sinks"  # end of the names of attention sinks
REPEATS_KEYS = frozenset({"jetmoe"})  # architectures that repeat keys for every query head before attention
MULTI_QUERY = frozenset({"gpt_bigcode", "falcon"})  # architectures whose config may choose one key head
BIASED = frozenset({"bloom", "mpt", "doge"})  # architectures with biases of scores; Falcon's config chooses them


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of attention and cache on one rank."""

    layers: int  # number of layers with attention
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    slides: bool = True  # whether any layer has a sliding window
    plain: bool = True  # whether all layers have plain scores (`ScoreOptions`) and equal sizes
    capped: bool = False  # whether only soft caps prevent this
    by_layer: tuple[LayerSize, ...] = ()  # sizes of all layers, if they differ
    attending: tuple[int, ...] = ()  # indices of the layers with attention, if there are others

    @property
    def sizes(self) -> dict[int, LayerSize]:
        """Sizes of the layers with attention, by index."""
        size = LayerSize(self.kv_heads, self.head_dim)
        indices = self.attending or range(self.layers)
        return {index: self.by_layer[index] if self.by_layer else size for index in indices}

    @property
    def page_bytes(self) -> int:
        """Size of one page in bytes: keys and values of all layers."""
        numbers = sum(size.kv_heads * size.head_dim for size in self.sizes.values())
        return 2 * self.page_size * self.dtype.itemsize * numbers


def attention_shape(model: PreTrainedModel, page_size: int, ranks: int = 1) -> AttentionShape:
    """Derives the sizes of attention and cache on one of `ranks` from the model's config.

    `actors.models.reference_check` verifies for every model class that its layers write exactly these sizes.
    """
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # some models have only recurrent layers
    split = ranks if _splits_heads(model) else 1
    by_layer = _sizes_by_layer(config, split)
    kinds = getattr(config, "layer_types", None) or ()
    attending = tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENDING)
    size = max(by_layer) if by_layer else LayerSize(_kv_heads(config, heads) // split, _head_dim(config, heads))
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    is_plain_but_for_softcap = (
        not any(name.endswith(SINKS) for name, _ in model.named_parameters())
        and "chunked_attention" not in kinds
        and not (config.model_type in BIASED or getattr(config, "alibi", False))
        and not by_layer
    )
    return AttentionShape(
        layers=len(attending) if kinds else int(config.num_hidden_layers),
        heads=heads // split,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        page_size=page_size,
        dtype=model.dtype,
        slides=getattr(config, "sliding_window", None) is not None,
        plain=is_plain_but_for_softcap and not has_softcap,
        capped=is_plain_but_for_softcap and has_softcap,
        by_layer=by_layer,
        attending=attending if len(attending) < len(kinds) else (),
    )


def _sizes_by_layer(config: PretrainedConfig, split: int) -> tuple[LayerSize, ...]:
    """Returns each layer's size if sizes differ, as in Gemma 4; otherwise an empty tuple."""
    if not config.to_dict().get("per_layer_config"):
        return ()
    return tuple(LayerSize(one.num_key_value_heads // split, one.head_dim) for one in config.per_layer_config)


def _splits_heads(model: PreTrainedModel) -> bool:
    """Returns whether ranks split the heads; a fused projection or a norm over all heads prevents this."""
    plan = model.tp_plan or {}
    styles = [style for name, style in plan.items() if ("attn" in name and "linear" not in name) or "attention" in name]
    return bool(styles) and GATHERED not in styles


def _has_latent_attention(config: PretrainedConfig) -> bool:
    """Returns whether each query head projects its keys and values from one shared latent vector."""
    return getattr(config, "kv_lora_rank", None) is not None


def _kv_heads(config: PretrainedConfig, heads: int) -> int:
    """Returns the number of key heads passed to attention; all of them are cached."""
    if _has_latent_attention(config) or config.model_type in REPEATS_KEYS:
        return heads
    if getattr(config, "new_decoder_architecture", False):  # of Falcon
        return int(config.num_kv_heads)
    if config.model_type in MULTI_QUERY:
        return 1 if config.multi_query else heads
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _head_dim(config: PretrainedConfig, heads: int) -> int:
    if _has_latent_attention(config):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    named = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None)
    size = int(named or config.hidden_size // heads)
    if config.model_type == "doge":
        return size + 1  # keys include a bias
    return 2 * size if config.model_type == "diffllama" else size  # two values per key


# The trial has one block per row, after contexts of several lengths, as in a target's step.
QUERIES = 5
PARENTS = (-1, 0, -1, 2)  # parents of the block's nodes, if it is a tree
CONTEXTS = (37, 160, 300, 511, 512, 700, 900, 1024)
WINDOW = 100
SOFTCAP = 2.0
PROMPT_TOKENS = 300  # tokens of a prompt chunk; exceeds a kernel's query block
WARM_UPS = 2
REPEATS = 5
PADDING = 8  # tokens
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Errors of a library that is missing, is not built for this device, or does not support the shape.
BACKEND_ERRORS = (
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OSError,
    subprocess.SubprocessError,
)

Make = Callable[[], AttentionBackend]
FALLBACK = SdpaGather.name
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriedBackend:
    """Result of one backend's trial: milliseconds of attention per step, or the reason why the backend is unusable."""

    name: str
    step_ms: float | None
    refused: str = ""
    no_trees: str = ""  # reason why a usable backend does not support trees


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """The selected backend and all trials; `tried` is empty if only one backend applies."""

    chosen: str
    tried: tuple[TriedBackend, ...] = ()
    takes_trees: bool = True
    combined: tuple[str, str] | None = None  # names of the backends for chains and for trees, if they differ

    @property
    def is_fallback(self) -> bool:
        """True if a GPU uses `sdpa_gather`, which copies pages that other backends read in place."""
        return bool(self.tried) and self.chosen == FALLBACK


class Trial:
    """Repeatable step of attention over random keys and values."""

    def __init__(self, shape: AttentionShape, device: torch.device, captured_context: int = 0) -> None:
        """Captured steps have page tables for `captured_context` tokens, which may determine a kernel's speed."""
        self._shape = shape
        self._captured_pages = -(-captured_context // shape.page_size)
        # Window kernels may take a minute to build, so they are built only for models with windows.
        self.windows = (None, WINDOW) if shape.slides else (None,)
        per_row = [-(-(context + QUERIES) // shape.page_size) for context in CONTEXTS]
        generator = torch.Generator().manual_seed(0)
        # Half of the pages are unused, and the rows' pages are not in order.
        pages = torch.randperm(2 * sum(per_row), generator=generator)
        tables = torch.split(pages[: sum(per_row)], per_row)
        size = LayerSize(shape.kv_heads, shape.head_dim)
        self._cache = PagedCache(len(pages), shape.page_size, {0: size}, shape.dtype, device)
        self._rows = [
            InputRow((0,) * QUERIES, at, 0, tuple(t.tolist())) for at, t in zip(CONTEXTS, tables, strict=True)
        ]
        self._trees = [replace(row, parents=PARENTS) for row in self._rows]
        self._prompt = InputRow((0,) * PROMPT_TOKENS, 0, 0, self._rows[-1].pages)
        total = QUERIES * len(CONTEXTS)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

        self._options = ScoreOptions(shape.head_dim**-0.5, softcap=SOFTCAP if shape.capped else None)
        self._query = random(total, shape.heads, shape.head_dim)
        self._new = random(total, 2 * shape.kv_heads, shape.head_dim)
        self._prompt_inputs = (
            random(PROMPT_TOKENS, shape.heads, shape.head_dim),
            random(PROMPT_TOKENS, 2 * shape.kv_heads, shape.head_dim),
        )
        self._old = [random(context, 2 * shape.kv_heads, shape.head_dim) for context in CONTEXTS]

    def attend(
        self, backend: AttentionBackend, window: int | None, trees: bool = False, is_padded: bool = False
    ) -> Tensor:
        """Returns the result of one layer with chains or trees; sets memory outside the rows to NaN.

        A step that `is_padded` needs a `PaddedBackend`. Raises ValueError unless padding gets zeros.
        """
        self._fill()
        rows = self._trees if trees else self._rows
        options = replace(self._options, window=window)
        if not is_padded:
            return exact_batch(rows, self._cache, backend).attend(0, self._query, self._new, options)
        batch = self._padded_batch(backend, rows)
        attended = batch.attend(0, self._padded(self._query), self._padded(self._new), options)
        total = len(self._query)
        if attended[total:].any():
            raise ValueError("padding does not get zeros")
        return attended[:total]

    def attend_prompt(self, backend: AttentionBackend, window: int | None) -> Tensor:
        """Returns the result of one layer with a long prompt chunk; sets memory outside all rows to NaN."""
        self._fill()
        options = replace(self._options, window=window)
        return exact_batch([self._prompt], self._cache, backend).attend(0, *self._prompt_inputs, options)

    def _fill(self) -> None:
        """Writes the rows' cached keys and values, and NaN to all other memory."""
        pool = self._cache.layer(0)
        pool[: self._cache.padding_slot] = torch.nan
        size = self._shape.page_size
        for row, old in zip(self._rows, self._old, strict=True):
            pages = torch.tensor(row.pages, device=pool.device)
            slots = (pages.unsqueeze(1) * size + torch.arange(size, device=pool.device)).flatten()
            pool[slots[: len(old)]] = old

    def _padded_batch(self, backend: AttentionBackend, rows: Sequence[InputRow]) -> RaggedBatch:
        assert isinstance(backend, PaddedBackend), f"{backend.name} has no padded plans"
        tokens = len(self._query) + PADDING
        pages = max(self._captured_pages, 1 + max(len(row.pages) for row in rows))
        shape = StepShape(tokens, len(rows) + 1, pages, 0, 0, trees=bool(rows[0].parents))
        step = PackedStep.padded(rows, self._cache, backend, shape, NO_DRAWS)
        batch = RaggedBatch(step, to_device(step.integers, self._cache.device))
        batch.place()
        return batch

    def _padded(self, values: Tensor) -> Tensor:
        return torch.cat([values, values[:PADDING]])

    def build(self, backend: AttentionBackend, trees: bool) -> None:
        """Attends once per kind of step, so that all kernels are built before serving."""
        for window in self.windows:
            for rows in self._kinds(trees):
                batch = exact_batch(rows, self._cache, backend)
                total = sum(len(row.tokens) for row in rows)
                query = self._query[:1].expand(total, -1, -1)
                batch.attend(0, query, self._new[:1].expand(total, -1, -1), replace(self._options, window=window))

    def _kinds(self, trees: bool) -> list[list[InputRow]]:
        """Returns batches of one or several rows: single tokens, chains, trees and long prompt chunks."""
        token = replace(self._rows[0], tokens=(0,))
        chains = [[token], self._rows[:1], self._rows[:2], [self._prompt]]
        return [*chains, self._trees[:1], self._trees[:2], [self._prompt, *self._trees[:2]]] if trees else chains

    def step(self, backend: AttentionBackend, capture: Capture | None = None) -> Callable[[], None]:
        """Returns a function that computes one step's attention in all layers and waits for the device.

        With `capture`, the backend must be a `PaddedBackend`, and the step's numbers are already on the device.
        """
        attend_layers: Callable[[], None] = partial(self._attend_layers, backend)
        if capture is not None:
            batch = self._padded_batch(backend, self._rows)
            query, new = self._padded(self._query), self._padded(self._new)

            def captured() -> None:
                batch.place()
                for _ in range(self._shape.layers):
                    batch.attend(0, query, new, self._options)

            attend_layers = capture(captured)

        def step() -> None:
            attend_layers()
            self.wait()

        return step

    def wait(self) -> None:
        """Waits for the device; raises its error if an operation failed there."""
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)

    def _attend_layers(self, backend: AttentionBackend) -> None:
        batch = exact_batch(self._rows, self._cache, backend)
        for _ in range(self._shape.layers):
            batch.attend(0, self._query, self._new, self._options)


Backend = TypeVar("Backend", bound=AttentionBackend)


class ChainsAndTrees(Generic[Backend]):
    """Uses one backend for steps of chains only, and another for steps with trees."""

    takes_trees = True

    def __init__(self, chains: Backend, trees: Backend) -> None:
        self.name = f"{chains.name}, {trees.name} for trees"
        self._chains = chains
        self._trees = trees

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> AttentionPlan:
        return (self._trees if any(row.parents for row in rows) else self._chains).plan(rows, cache)


class PaddedChainsAndTrees(ChainsAndTrees[PaddedBackend]):
    """Uses two backends that can be captured. A shape selects one, so steps with trees need their own shapes."""

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> AttentionPlan:
        return (self._trees if shape.trees else self._chains).padded_plan(flat, cache, shape)


def combine(chains: AttentionBackend, trees: AttentionBackend) -> AttentionBackend:
    """Returns a backend for chains and trees, which can be captured if both can."""
    if isinstance(chains, PaddedBackend) and isinstance(trees, PaddedBackend):
        return PaddedChainsAndTrees(chains, trees)
    return ChainsAndTrees(chains, trees)


def fastest(
    factories: Mapping[str, Make],
    trial: Trial,
    tolerance: float,
    clock: Callable[[], float] = time.perf_counter,
    capture: Capture | None = None,
) -> tuple[AttentionBackend, AttentionReport]:
    """Returns the fastest correct backend; if it does not support trees, the fastest that does serves these.

    With `capture`, backends that can be captured come first, since capturing a step saves more time than the fastest
    kernel, and are measured captured. After one of them, no others are tried: some compile for minutes. `SdpaGather` is
    the reference, and the result only if no backend is correct.
    """
    reference = SdpaGather()
    tried = [TriedBackend(reference.name, _step_ms(trial.step(reference), clock))]
    correct: list[tuple[bool, float, AttentionBackend]] = []
    takes_trees: list[tuple[bool, float, AttentionBackend]] = []
    for name, make in factories.items():
        try:
            backend = make()
            is_captured = capture is not None and isinstance(backend, PaddedBackend)
            if not is_captured and any(not is_eager for is_eager, *_ in takes_trees):
                tried.append(TriedBackend(name, None, "its steps cannot be captured, unlike those of another backend"))
                continue
            check_backend(backend, trial, reference, tolerance, is_padded=is_captured)
            step_ms = _step_ms(trial.step(backend, capture if is_captured else None), clock)
        except BACKEND_ERRORS as error:
            trial.wait()  # raises a device's error, after which no other backend would work
            tried.append(TriedBackend(name, None, f"{type(error).__name__}: {error}"))
            continue
        no_trees = _no_trees(backend, trial, reference, tolerance, is_captured)
        tried.append(TriedBackend(name, step_ms, no_trees=no_trees))
        correct.append((not is_captured, step_ms, backend))
        if not tried[-1].no_trees:
            takes_trees.append(correct[-1])
    if not correct:
        return reference, AttentionReport(reference.name, tuple(tried))
    best = min(correct, key=lambda one: one[:2])
    if takes_trees and best not in takes_trees:
        for_trees = min(takes_trees, key=lambda one: one[:2])[2]
        backends = combine(best[2], for_trees)
        return backends, AttentionReport(backends.name, tuple(tried), combined=(best[2].name, for_trees.name))
    return best[2], AttentionReport(best[2].name, tuple(tried), bool(takes_trees))


def _no_trees(
    backend: AttentionBackend, trial: Trial, reference: AttentionBackend, tolerance: float, is_padded: bool
) -> str:
    """Returns the reason why a backend does not support trees; empty if it does. It must be correct for chains."""
    if not backend.takes_trees:
        return "its kernel does not support masks"
    try:
        check_backend(backend, trial, reference, tolerance, is_padded, trees=True)
    except BACKEND_ERRORS as error:
        trial.wait()
        return f"{type(error).__name__}: {error}"
    return ""


def check_backend(
    backend: AttentionBackend,
    trial: Trial,
    reference: AttentionBackend,
    tolerance: float,
    is_padded: bool,
    trees: bool = False,
) -> None:
    """Raises ValueError if a result differs from the reference by more than the tolerance.

    Compares steps with `trees`, or steps of chains and a long prompt chunk.
    """
    for window in trial.windows:
        expected = trial.attend(reference, window, trees)
        pairs = [(trial.attend(backend, window, trees, pads), expected) for pads in {False, is_padded}]
        if not trees:
            pairs.append((trial.attend_prompt(backend, window), trial.attend_prompt(reference, window)))
        for found, right in pairs:
            if not torch.allclose(found, right, atol=tolerance, rtol=tolerance):
                deviation = float((found.float() - right.float()).abs().max())
                raise ValueError(
                    f"its result is off by {deviation:.3g} with window {window}; at most {tolerance:.3g} is allowed"
                )


def _step_ms(step: Callable[[], None], clock: Callable[[], float]) -> float:
    for _ in range(WARM_UPS):
        step()
    times = []
    for _ in range(REPEATS):
        began = clock()
        step()
        times.append(1000 * (clock() - began))
    return statistics.median(times)


def gpu_factories(shape: AttentionShape, device: torch.device) -> dict[str, Make]:
    """Returns the constructors of all backends for GPUs except `SdpaGather`, by name."""
    factories: dict[str, Make] = {"paged": lambda: paged_for(device)}
    if shape.plain:
        factories["flashinfer"] = lambda: flashinfer_for(device)
        factories["varlen"] = lambda: varlen_for(device)  # last, since it replaces kernels of torch
    return factories


@torch.inference_mode()
def create_backend(report: AttentionReport, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """Creates the backend that another rank has chosen, without measuring."""
    if report.chosen == FALLBACK:
        return SdpaGather()
    factories = gpu_factories(shape, device)
    if report.combined is None:
        backend = factories[report.chosen]()
    else:
        backend = combine(*(factories[name]() for name in report.combined))
    Trial(shape, device).build(backend, report.takes_trees)
    return backend


@torch.inference_mode()
def choose_attention(
    shape: AttentionShape, device: torch.device, captured_context: int | None = None
) -> tuple[AttentionBackend, AttentionReport]:
    """Measures the backends on a GPU and returns the fastest correct one, by default `paged`.

    `captured_context` is the longest text, in tokens, whose steps are captured; None if no steps are.

    Only `SdpaGather` works on a CPU, or supports scores that are neither plain nor capped.
    """
    if device.type != "cuda" or not (shape.plain or shape.capped):
        return SdpaGather(), AttentionReport(SdpaGather.name)
    trial = Trial(shape, device, captured_context or 0)
    capture = None if captured_context is None else CudaCapture()
    backend, report = fastest(gpu_factories(shape, device), trial, TOLERANCE[shape.dtype], capture=capture)
    trial.build(backend, report.takes_trees)
    if not backend.name.startswith("varlen"):
        restore_flash_attention_impl(_raise_warn=False)
    if report.is_fallback:
        log.error("%s", fallback_warning(report))
    return backend, report


def fallback_warning(report: AttentionReport) -> str:
    """Returns the warning that a GPU uses the slow fallback, with the reason against each other backend."""
    refused = "; ".join(f"{one.name}: {one.refused}" for one in report.tried if one.refused)
    return (
        "attention on this GPU uses gathered, which copies all keys and values in every layer; install what the others"
        f" miss: {refused}"
    )
