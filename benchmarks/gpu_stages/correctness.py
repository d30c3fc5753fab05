"""Stage B: captured steps equal eager ones, attention equals `SdpaGather`, decisions equal those of the CPU, and a row
does not depend on its step with invariant numerics.
"""

import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

from actors.attention.invariant import invariant_backend
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import TOLERANCE, AttentionShape, Trial, attention_shape, choose_attention
from actors.compute.capture import Capture
from actors.compute.kv_cache import InputRow
from actors.compute.linear import GPU_TILE, InvariantProducts
from actors.engine.invariance import InvarianceCheck
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording, recording_on
from actors.models.decoder import decoder_for
from actors.models.fused import compile_invariant
from actors.sampling.acceptance import DrawAddress, PendingBlock, decide
from actors.sampling.draws import Draws
from actors.sampling.logits_processors import chain_of
from cluster.errors import ModelError
from gpu_stages.results import OUT_OF_TIME, Emit, Result, Setting, Unmeasured
from gpu_stages.steps import NOT_PADDED, PAGE_SIZE, capturable, capture_on
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import Acceptance, Open, Sampling, TokenRules

LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}  # relative to 1 + |logit|
KINDS = ("single tokens", "chains", "trees")
LARGEST_ROW = 33  # tokens


@dataclass(frozen=True)
class Sizes:
    """Shapes of the compared steps."""

    hidden: int
    vocabulary: int
    sessions: int
    pages_each: int
    shapes: tuple[AttentionShape, ...]  # of the attention backends


def attention_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(2, heads, kv_heads, head_dim, PAGE_SIZE, dtype, slides=False)


FULL = Sizes(
    512,
    2048,
    64,
    16,
    (attention_sizes(32, 8, 128, torch.bfloat16), attention_sizes(32, 8, 64, torch.bfloat16)),
)
TINY = Sizes(64, 300, 4, 6, (attention_sizes(4, 2, 16, torch.float32),))


@dataclass(frozen=True)
class BucketCheck(Result):
    """Captured against eager steps of one shape, with NaN in all memory that no row owns."""

    model: str
    dtype: str
    tokens: int
    samples: bool
    steps: int  # replays with different rows
    largest_error: float  # of a logit, relative to 1 + |logit|
    different_tokens: int  # drawn; rounding may cause them in bfloat16
    changed_slots: int  # of the cache, other than those of the rows
    passed: bool


@dataclass(frozen=True)
class AttentionCheck(Result):
    """One attention backend against `SdpaGather`. One that is refused, or takes no trees, is not used for them."""

    backend: str
    head_dim: int
    step_ms: float | None
    refused: str
    no_trees: str


@dataclass(frozen=True)
class PaddedCheck(Result):
    """Padded plans of the captured backend against `SdpaGather`."""

    backend: str
    head_dim: int
    trees: bool
    largest_error: float
    passed: bool


@dataclass(frozen=True)
class DecisionCheck(Result):
    """Decisions of the device against those of the CPU, from the same logits."""

    blocks: int
    different: int
    passed: bool


@dataclass(frozen=True)
class InvariantResult(Result):
    """The check at load of `model.numerics: invariant`; `fault` is empty if a row does not depend on its step."""

    dtype: str
    fault: str
    passed: bool


@dataclass(frozen=True)
class BrokenCheck(Result):
    """A check that raised an error."""

    check: str
    error: str
    passed: bool = False


def run(setting: Setting, emit: Emit) -> None:
    """Makes all checks, then raises RuntimeError if one failed."""
    sizes = TINY if setting.is_tiny else FULL
    checks: list[Result] = []

    def noted(result: Result) -> None:
        checks.append(result)
        emit(result)

    device = setting.device
    vocabulary = 500 if setting.is_tiny else 50_000
    todo: dict[str, Callable[[], None]] = {"decisions": lambda: noted(compared_decisions(device, vocabulary))}
    for shape in sizes.shapes:
        todo[f"attention, head dim {shape.head_dim}"] = partial(check_attention, shape, device, noted)
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        for name in MODELS:
            todo[f"captured steps of {name} in {dtype}"] = partial(check_buckets, name, sizes, dtype, setting, noted)
        todo[f"invariance in {dtype}"] = partial(check_invariance, sizes, dtype, device, noted)
    for check, run_check in todo.items():
        try:
            run_check()
        except Exception as error:  # noqa: BLE001  # run the other checks anyway
            traceback.print_exc()
            noted(BrokenCheck(check, f"{type(error).__name__}: {error}"))
    if any(not passed for passed in verdicts(checks)):
        raise RuntimeError(f"only {summary(checks)}; the results name the others")


CHECKS = BucketCheck | PaddedCheck | DecisionCheck | InvariantResult | BrokenCheck


def verdicts(results: Sequence[Result]) -> list[bool]:
    return [one.passed for one in results if isinstance(one, CHECKS)]


def summary(results: Sequence[Result]) -> str:
    passed = verdicts(results)
    return f"{sum(passed)} of {len(passed)} checks passed"


# ---------------------------------------------------------------- captured steps


def check_buckets(name: str, sizes: Sizes, dtype: torch.dtype, setting: Setting, emit: Emit) -> None:
    """Compares captured steps of all shapes with eager steps."""
    pair = CapturedPair(name, sizes, dtype, setting.device, capture_on(setting.device))
    if pair.why_not:
        emit(Unmeasured(f"captured steps of {name}", pair.why_not))
        return
    for tokens in pair.buckets.tokens:
        for samples in (False, True):
            if not setting.has_time(5.0):
                emit(Unmeasured(f"captured steps of {name} with {tokens} tokens in {dtype}", OUT_OF_TIME))
                return
            emit(pair.check(tokens, samples))


MODELS = {"llama": LlamaConfig, "gemma3": Gemma3TextConfig}  # gemma3 runs in transformers' own code


def a_model(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MODELS[name](
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=sizes.hidden // 8,
        initializer_range=0.1,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.to(device, dtype).eval()


class CapturedPair:
    """An eager and a capturing runner of one model, with caches of equal contents."""

    def __init__(self, name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, capture: Capture) -> None:
        model = a_model(name, sizes, dtype, device)
        self._name = name
        self._shape = attention_shape(model, PAGE_SIZE)
        attention, _ = choose_attention(self._shape, device, sizes.pages_each * PAGE_SIZE)
        padded = capturable(attention, device)
        decoder = decoder_for(model)
        self.why_not = NOT_PADDED.format(attention.name) if padded is None else decoder.capture_fault((1, 64))
        self.buckets = Buckets.for_sessions(sizes.sessions, sizes.pages_each * PAGE_SIZE, PAGE_SIZE, attention)
        self._sizes = sizes
        self._dtype = dtype
        self._takes_trees = attention.takes_trees
        self._random = random.Random(1)
        self._generator = torch.Generator().manual_seed(2)
        self._eager, self._captured = (
            ModelRunner(
                model,
                sizes.sessions * sizes.pages_each,
                PAGE_SIZE,
                attention if recording is None else padded,
                decoder,
                is_checked=True,
                vocabulary=sizes.vocabulary - 3,  # the last ids are padding of the LM head
                recording=recording,
            )
            for recording in (None, Recording(self.buckets, capture) if padded is not None else None)
        )

    @torch.inference_mode()
    def check(self, tokens: int, samples: bool) -> BucketCheck:
        """Compares steps of single tokens, chains and trees in the bucket of `tokens` tokens."""
        errors = []
        different = changed = steps = 0
        for kind in KINDS:
            rows = self._rows(tokens, kind)
            if not rows:
                continue
            self._fill(rows)
            positions = sum(row.logits for row in rows)
            draws = self._draws(positions) if samples else Draws()
            before = [pool.clone() for pool in self._pools(self._captured)]
            expected = self._eager.forward(rows, draws=draws)
            found = self._captured.forward(rows, draws=draws)
            assert expected.drawn is not None, "the runner draws"
            assert found.drawn is not None, "the runner draws"
            error = (found.logits.float() - expected.logits.float()).abs() / (1 + expected.logits.float().abs())
            errors.append(float(error.max()))
            different += int((found.drawn != expected.drawn).any(dim=1).sum())
            changed += self._changed_slots(before, rows)
            steps += 1
        largest = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        is_close = largest <= LOGIT_TOLERANCE[self._dtype]
        passed = is_close and not changed and (not different or self._dtype is not torch.float32)
        dtype = str(self._dtype).removeprefix("torch.")
        return BucketCheck(self._name, dtype, tokens, samples, steps, largest, different, changed, passed)

    def _rows(self, bucket: int, kind: str) -> list[InputRow]:
        """Returns rows that need this bucket; empty if this kind of row does not fit in it."""
        below = max((size for size in self.buckets.tokens if size < bucket), default=0)
        total = self._random.randint(below + 1, bucket)
        most = min(total, self._sizes.sessions)
        if kind == KINDS[0]:
            if total > most:
                return []
            lengths = [1] * total
        else:
            if total < 2 or (kind == KINDS[2] and not self._takes_trees):
                return []
            lengths = list(self._lengths(total, self._random.randint(-(-total // LARGEST_ROW), most)))
        tables = self._tables()
        return [self._row(length, table, kind) for length, table in zip(lengths, tables, strict=False)]

    def _lengths(self, total: int, rows: int) -> Iterator[int]:
        """Divides `total` tokens among rows at random."""
        for left in range(rows - 1, -1, -1):
            length = self._random.randint(max(1, total - left * LARGEST_ROW), min(LARGEST_ROW, total - left))
            total -= length
            yield length

    def _tables(self) -> list[tuple[int, ...]]:
        pages = self._random.sample(
            range(self._sizes.sessions * self._sizes.pages_each), k=self._sizes.sessions * self._sizes.pages_each
        )
        return [tuple(pages[first :: self._sizes.sessions]) for first in range(self._sizes.sessions)]

    def _row(self, length: int, table: tuple[int, ...], kind: str) -> InputRow:
        drawn = self._random
        start = drawn.randint(1, self._sizes.pages_each * PAGE_SIZE - length)
        tokens = tuple(drawn.sample(range(self._sizes.vocabulary - 3), k=length))
        parents = tuple(drawn.randint(-1, node - 1) for node in range(length - 1)) if kind == KINDS[2] else ()
        if DraftTree(tokens[1:], parents).is_chain:
            parents = ()
        return InputRow(tokens, start, length, table, parents)

    def _draws(self, positions: int) -> Draws:
        drawn = self._random
        sampled = tuple(sorted(drawn.sample(range(positions), drawn.randint(1, positions))))
        keys = tuple(drawn.getrandbits(63) for _ in sampled)
        return Draws(sampled, keys, tuple(drawn.choice((0.3, 1.0, 1.7)) for _ in sampled))

    def _pools(self, runner: ModelRunner) -> list[Tensor]:
        return [runner.cache.layer(layer) for layer in self._shape.sizes]

    def _fill(self, rows: Sequence[InputRow]) -> None:
        """Writes random keys and values where the rows have cached tokens, and NaN everywhere else."""
        cache = self._eager.cache
        slots = torch.tensor([slot for row in rows for slot in _slots(row, range(row.start))], device=cache.device)
        for pools in zip(self._pools(self._eager), self._pools(self._captured), strict=True):
            cached = torch.randn(len(slots), *pools[0].shape[1:], generator=self._generator).to(pools[0])
            for pool in pools:
                pool[: cache.padding_slot] = torch.nan
                pool[cache.scrap_slot :] = torch.nan
                pool[slots] = cached

    def _changed_slots(self, before: Sequence[Tensor], rows: Sequence[InputRow]) -> int:
        """Returns the number of slots that a captured step changed, without those that it must write."""
        cache = self._captured.cache
        written = [slot for row in rows for slot in _slots(row, row.slots)]
        changed = torch.zeros(cache.scrap_slot, dtype=torch.bool, device=cache.device)
        for was, pool in zip(before, self._pools(self._captured), strict=True):
            equal = (was == pool) | (was.isnan() & pool.isnan())
            changed |= ~equal[: cache.scrap_slot].flatten(1).all(dim=1)
        changed[torch.tensor(written, device=cache.device)] = False
        return int(changed.sum())


def _slots(row: InputRow, at: range) -> list[int]:
    return [row.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE for slot in at]


@torch.inference_mode()
def check_invariance(sizes: Sizes, dtype: torch.dtype, device: torch.device, emit: Emit) -> None:
    """Checks a runner as a target with invariant numerics does."""
    model = a_model("llama", sizes, dtype, device)
    name = str(dtype).removeprefix("torch.")
    try:
        backend, report = invariant_backend(attention_shape(model, PAGE_SIZE), device)
    except ModelError as error:
        emit(Unmeasured(f"invariant numerics in {name}", str(error)))
        return
    decoder = decoder_for(model, InvariantProducts(), compile_function=compile_invariant)
    pages, context = sizes.sessions * sizes.pages_each, sizes.pages_each * PAGE_SIZE
    buckets = Buckets.for_sessions(sizes.sessions, context, PAGE_SIZE, backend, GPU_TILE)
    recording = recording_on(device, backend, decoder, buckets)
    runner = ModelRunner(model, pages, PAGE_SIZE, backend, decoder, is_checked=True, recording=recording)
    fault = InvarianceCheck(runner, PAGE_SIZE, pages, context, report.takes_trees).fault()
    emit(InvariantResult(name, fault, not fault))


# ---------------------------------------------------------------- attention


@torch.inference_mode()
def check_attention(shape: AttentionShape, device: torch.device, emit: Emit) -> None:
    """Compares all backends, as at a target's start, and the padded plans of the selected one."""
    attention, report = choose_attention(shape, device, captured_context=4096)
    for one in report.tried:
        emit(AttentionCheck(one.name, shape.head_dim, one.step_ms, one.refused, one.no_trees))
    padded = capturable(attention, device)
    if padded is None:
        emit(Unmeasured(f"padded plans, head dim {shape.head_dim}", NOT_PADDED.format(attention.name)))
        return
    trial = Trial(shape, device)
    for trees in (False, True) if report.takes_trees else (False,):
        expected = trial.attend(SdpaGather(), None, trees).float()
        error = float((trial.attend(padded, None, trees, is_padded=True).float() - expected).abs().max())
        emit(PaddedCheck(padded.name, shape.head_dim, trees, error, error <= TOLERANCE[shape.dtype]))


# ---------------------------------------------------------------- decisions

REQUESTS = (
    (Sampling(temperature=0.0), TokenRules()),
    (Sampling(temperature=0.0, presence_penalty=0.5), TokenRules()),
    (Sampling(repetition_penalty=1.3, frequency_penalty=0.2), TokenRules()),
    (Sampling(), TokenRules()),
    (Sampling(), TokenRules(logit_bias=((1, 2.0), (9, -5.0)), bad_words=((1, 2), (6,)))),
    (Sampling(temperature=0.8, top_k=20, top_p=0.9), TokenRules()),
    (Sampling(min_p=0.05), TokenRules(allowed=tuple(range(40)))),
)
DRAFTS = (
    (
        Acceptance.REJECTION,
        DraftTree.chain((1, 2), SparseProbs(((1, 5, 9), (2, 6, 0)), ((30, 5, 1), (9, 9, 0)))),
    ),
    (Acceptance.COUPLED, DraftTree((1, 2), (-1, -1))),
)


def compared_decisions(device: torch.device, vocabulary: int) -> DecisionCheck:
    """Decides blocks of all kinds of requests on the device and on the CPU, from equal float32 logits."""
    blocks = _blocks()
    logits = 3 * torch.randn(3 * len(blocks), vocabulary, generator=torch.Generator().manual_seed(1))
    logits[:, :10] += 8
    pairs = zip(decide(_blocks(), logits.to(device)), decide(blocks, logits), strict=True)
    different = sum(found != expected for found, expected in pairs)
    return DecisionCheck(len(blocks), different, different == 0)


def _blocks() -> list[PendingBlock]:
    return [
        _pending(sampling, rules, rule, draft, seed)
        for rule, draft in DRAFTS
        for sampling, rules in REQUESTS
        for seed in range(6)
    ]


def _pending(sampling: Sampling, rules: TokenRules, rule: Acceptance, draft: DraftTree, seed: int) -> PendingBlock:
    request = replace(Open.measured("decided", (4, 4, 7), 100, 2, sampling), rules=rules, prompt_len=1)
    chain = chain_of(request)
    if chain is not None:
        chain.follow(request.tokens)
    return PendingBlock(rule, sampling, draft, chain, DrawAddress(seed, 0, 50))
