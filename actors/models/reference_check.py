"""Proves at load that this engine computes the same logits as transformers for a model's class and config.

A small random model of the same class and config runs the steps of serving: prompt chunks, single tokens, blocks, a
rejection, a tree, and two sessions per step. Its logits are compared with transformers' own forward over whole texts. A
model is refused if its logits differ, if it fails, if it attends without the cache, or if it caches other sizes than
planned.
"""

import copy
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from actors.attention import ScoreOptions
from actors.attention.batch import PackedStep, RaggedBatch
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import ATTENDING, attention_shape
from actors.compute.collectives import Group, SingleRank, ThreadGroup
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache, to_device
from actors.models.config_reader import RECURRENT, is_recurrent, read_config
from actors.models.decoder import check_positions, decoder_for
from actors.models.sharding import shard
from actors.models.small_config import SMALL_VOCABULARY, TEXT_TOKENS, small_config
from cluster.errors import ModelError
from cluster.page_allocator import SlotMove

LAYER_TYPES = ATTENDING | RECURRENT | {"mlp", "moe"}
SIZES_BY_LAYER = frozenset({"head_dim", "num_key_value_heads"})  # fields that may differ between layers
IGNORED_KEYS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
FIX = "use another model, or target.engine: vllm for a target"
PAGE_SIZE = 8
PAGES = (tuple(range(24, 12, -1)), tuple(range(12)))  # pages of each session; the first session's pages descend
FIRST_TOKEN = 3  # smaller ids may be special tokens
TOLERANCE = 1e-3  # relative to the largest logit; another summation order causes 1e-6, a wrong key 0.1
SEEDS = (0, 1)  # two experts may tie exactly for a token of one model, but hardly in both models
MAX_PARAMETERS = 20_000_000  # maximum size of the small model
NOISE = 0.1  # scale of the noise added to norms and biases, initially ones and zeros
TREE = (-1, 0, -1, 2)  # parents of nodes: two branches of two nodes
BASE = 33  # tokens before the tree
A_TOKENS = BASE + 5  # tokens of the first session, including the second branch and three more tokens
B_TOKENS = 93  # tokens of the second session


def check_model(folder: Path, *, ranks: int = 1, max_context: int | None = None) -> None:
    """Raises ModelError if a checkpoint's class and config cannot be proved exact. Reads no weights.

    With several `ranks`, also checks the model split over two. `max_context` is the maximum session length, if known.
    """
    config = read_config(folder)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelError(
            f"{folder} is a {config.model_type}, for which transformers has no causal language model; {FIX}"
        )
    is_part = kind.config_class is type(config.get_text_config())  # text model of a multimodal model
    check_class(kind, config.get_text_config() if is_part else config, ranks=ranks, context=max_context)


def check_class(
    kind: type[PreTrainedModel], config: PretrainedConfig, *, ranks: int = 1, context: int | None = None
) -> None:
    """Checks a class and config like `check_model`; proves each once per process."""
    compared = {name: value for name, value in config.to_dict().items() if name not in IGNORED_KEYS}
    _prove(_Case(kind, json.dumps(compared, sort_keys=True, default=str), min(ranks, 2), context, config))


@dataclass(frozen=True, slots=True)
class _Case:
    """A class and config to prove. Equality compares the content of configs."""

    kind: type[PreTrainedModel]
    fields: str
    ranks: int
    context: int | None
    config: PretrainedConfig = field(compare=False)


@lru_cache(maxsize=64)
def _prove(case: _Case) -> None:
    """Proves a case. Raises ModelError on failure. Does not cache failures."""
    text = case.config.get_text_config()
    by_layer = text.to_dict().get("per_layer_config") or {}
    if different := {name for fields in by_layer.values() for name in fields} - SIZES_BY_LAYER:
        raise ModelError(
            f"{case.kind.__name__} has layers that differ in {', '.join(sorted(different))} (per_layer_config), which"
            f" is not supported; {FIX}"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if not getattr(text, "num_attention_heads", None) and not RECURRENT >= kinds > set():
        raise ModelError(f"{case.kind.__name__} has no attention heads by its config; {FIX}")
    check_positions(case.config, case.context)
    others = kinds - LAYER_TYPES
    if others:
        raise ModelError(
            f"{case.kind.__name__} has layers that are not supported ({', '.join(sorted(others))}), expected"
            f" {', '.join(sorted(LAYER_TYPES))}; {FIX}"
        )
    problem: _WrongError
    for seed in SEEDS:
        try:
            return _serve_small(case, seed)
        except _DifferentLogitsError as error:
            problem = error
        except _WrongError as error:
            problem = error
            break
    raise ModelError(f"{case.kind.__name__} cannot be served: {problem}; {FIX}") from problem


class _WrongError(Exception):
    """The engine does not serve a class exactly."""


class _DifferentLogitsError(_WrongError):
    """Logits differ from transformers', which may happen once by chance if two experts tie."""


def _serve_small(case: _Case, seed: int) -> None:
    """Serves a small random model. Raises _WrongError with the reason if it fails."""
    texts, model = _reference(case, seed)
    try:
        models: list[tuple[PreTrainedModel, Group]] = (
            [(model, SingleRank())] if case.ranks == 1 else _shares(model, case.ranks)
        )
    except ModelError as error:
        raise ModelError(f"{case.kind.__name__} cannot be split: {error}") from error
    try:
        ranks = [_CheckedRank(part, group, case.context) for part, group in models]
    except Exception as error:  # loading would raise the same error
        raise _wrong(error) from error
    with ThreadPoolExecutor(len(ranks)) as pool:  # ranks wait for each other, so they need threads
        errors = [future.exception() for future in [pool.submit(rank.run, texts) for rank in ranks]]
    failures = [error for error in errors if error is not None]
    failures.sort(
        key=lambda error: isinstance(error, threading.BrokenBarrierError)
    )  # a rank's own error precedes errors caused by it
    if failures:
        raise _wrong(failures[0]) from failures[0]


def _wrong(error: BaseException) -> _WrongError:
    if isinstance(error, _WrongError):
        return error
    return _WrongError(str(error) if isinstance(error, ModelError) else f"its small test model fails ({_named(error)})")


def _named(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# ---------------------------------------------------------------- transformers' results


@dataclass(frozen=True, slots=True)
class _Texts:
    """Tokens of two sessions, rejected draft tokens and a side branch, with transformers' logits of each text."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    rejected: tuple[int, ...]  # tokens drafted after 27 tokens of session a
    branch: tuple[int, ...]  # other branch of the tree; session a continues with the first branch
    logits: dict[tuple[int, ...], Tensor]  # each (tokens, vocabulary), by full text

    def expected(self, text: tuple[int, ...], count: int) -> Tensor:
        """Returns the logits at the last `count` tokens of a text."""
        whole = next(logits for of, logits in self.logits.items() if of[: len(text)] == text)
        return whole[len(text) - count : len(text)]


def _reference(case: _Case, seed: int) -> tuple[_Texts, PreTrainedModel]:
    """Builds the first small config that works; returns texts, with transformers' uncached logits, and the model."""
    reasons = []
    for with_widths in (True, False):
        try:
            config = small_config(case.config, context=case.context, with_widths=with_widths)
            model = _random_model(case.kind, config, seed)
            return _plain_logits(model, seed), model
        except Exception as error:  # noqa: BLE001 - configs raise arbitrary errors, which are reported
            reasons.append(_named(error))
    raise _WrongError(f"no small test model of it can be built ({reasons[0]})")


def _random_model(kind: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Returns a model with weights large enough to reveal a wrong key. Preserves torch's generator state."""
    with torch.device("meta"):
        parameters = kind._from_config(config, dtype=torch.float32).num_parameters()
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters} parameters are too many for a check; at most {MAX_PARAMETERS} are allowed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Falcon's eager attention adds its biases by position twice.
        attention = "sdpa" if getattr(config, "alibi", False) else "eager"
        model: PreTrainedModel = kind._from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.data = weight + NOISE * noise if weight.ndim < 2 else noise / weight.shape[-1] ** 0.5
    return model.requires_grad_(False)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, seed: int) -> _Texts:
    vocabulary = min(SMALL_VOCABULARY, int(model.config.get_text_config().vocab_size))
    drawn = torch.randint(
        FIRST_TOKEN, vocabulary, (2, B_TOKENS), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    a, b = tuple(drawn[0][:A_TOKENS]), tuple(drawn[1])
    rejected, branch = tuple(drawn[0][-3:]), tuple(drawn[0][-5:-3])
    whole = (a, b, a[:27] + rejected, a[:BASE] + branch)
    logits = {text: model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in whole}
    return _Texts(a, b, rejected, branch, logits)


# ---------------------------------------------------------------- our results


@dataclass(frozen=True, slots=True)
class _Attended:
    """Arguments of one attention call."""

    layer: int
    options: ScoreOptions


class _RecordedBatch(RaggedBatch):
    """Batch that records each layer's attention arguments. Raises _WrongError for keys of another size than planned."""

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache, planned: Mapping[int, LayerSize]) -> None:
        step = PackedStep.exact(rows, cache, SdpaGather())
        super().__init__(step, to_device(step.integers, cache.device))
        self.place()
        self.attended: list[_Attended] = []
        self._planned = planned

    def attend(self, layer: int, query: Tensor, key_value: Tensor, options: ScoreOptions) -> Tensor:
        _, both, head_dim = key_value.shape
        planned = self._planned.get(layer)
        if planned is None:
            raise _WrongError(f"layer {layer} attends, but its config gives it no attention")
        if (both // 2, head_dim) != planned:
            raise _WrongError(
                f"layer {layer} caches {both // 2} key-value heads of size {head_dim}, but its config gives"
                f" {planned.kv_heads} of size {planned.head_dim}"
            )
        self.attended.append(_Attended(layer, options))
        return super().attend(layer, query, key_value, options)


@dataclass(frozen=True, slots=True)
class _Part:
    """A row of a step, and its expected logits."""

    row: InputRow
    expected: Tensor


class _CheckedRank:
    """Small model, or one rank's share of it, with its cache."""

    def __init__(self, model: PreTrainedModel, group: Group, context: int | None) -> None:
        self._config = model.config.get_text_config()
        self._shape = attention_shape(model, PAGE_SIZE, group.size)
        self._decode = decoder_for(model, context=context and min(context, TEXT_TOKENS))
        pages = len(PAGES[0]) + len(PAGES[1])
        self._cache = PagedCache(pages, PAGE_SIZE, self._shape.sizes, torch.float32, torch.device("cpu"))
        self._group = group
        self._is_recurrent = is_recurrent(model.config)

    def run(self, texts: _Texts) -> None:
        """Runs every kind of step. Raises _WrongError at the first step that contradicts transformers or the config."""
        try:
            self._run(texts)
        except BaseException:
            if isinstance(self._group, ThreadGroup):
                self._group.abort()  # releases the other ranks
            raise

    @torch.inference_mode()
    def _run(self, texts: _Texts) -> None:
        a, b = texts.a, texts.b
        wrong = a[:27] + texts.rejected
        steps = (
            ("the beginning of a prompt", [(0, a[:14], 0, 2)]),
            ("parts of two prompts", [(0, a[:20], 14, 1), (1, b[:33], 0, 33)]),
            ("a token beside a part of a prompt", [(0, a[:21], 20, 1), (1, b[:60], 33, 1)]),
            ("two blocks", [(0, a[:26], 21, 5), (1, b[:66], 60, 6)]),
            ("a block that is rejected beside a token", [(0, wrong, 26, 4), (1, b[:67], 66, 1)]),
            ("a block after a rejection", [(0, a[:32], 27, 5), (1, b[:90], 67, 2)]),
        )
        for what, parts in steps:
            chains = [self._chain(texts, *part) for part in parts]
            self._step(what, chains)
        if self._is_recurrent:  # supports only chains
            self._step("the last tokens", [self._chain(texts, 0, a, BASE - 1, 6), self._chain(texts, 1, b, 90, 3)])
            return
        tree = _Part(
            InputRow((a[BASE - 1], *texts.branch, *a[BASE : BASE + 2]), BASE - 1, 5, PAGES[0], TREE),
            torch.cat(
                [
                    texts.expected(a[:BASE], 1),
                    texts.expected(a[:BASE] + texts.branch, 2),
                    texts.expected(a[: BASE + 2], 2),
                ]
            ),
        )
        self._step("a tree", [tree, self._chain(texts, 1, b[:91], 90, 1)])
        slots = [PAGES[0][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(BASE, BASE + len(TREE))]
        self._cache.move((SlotMove(slots[2], slots[0]), SlotMove(slots[3], slots[1])))
        after = [self._chain(texts, 0, a, BASE + 2, 3), self._chain(texts, 1, b, 91, 2)]
        self._step("tokens after a tree", after)

    def _chain(self, texts: _Texts, session: int, text: tuple[int, ...], start: int, count: int) -> _Part:
        return _Part(InputRow(text[start:], start, count, PAGES[session]), texts.expected(text, count))

    def _step(self, what: str, parts: Sequence[_Part]) -> None:
        batch = _RecordedBatch([part.row for part in parts], self._cache, self._shape.sizes)
        logits = self._decode.shard.gather(self._decode(batch).logits)
        self._check_attention(batch.attended)
        expected = torch.cat([part.expected for part in parts])
        deviation = float((logits - expected).abs().max() / expected.abs().max())
        if not deviation < TOLERANCE:  # also true for NaN
            raise _DifferentLogitsError(
                f"its logits differ by {deviation:.2g} of the largest logit from transformers' own forward, compared"
                f" for {what} with small random weights"
            )

    def _check_attention(self, attended: Sequence[_Attended]) -> None:
        """Raises _WrongError unless every layer attended exactly once, with the window in the config."""
        times = Counter(call.layer for call in attended)
        kinds = getattr(self._config, "layer_types", None) or ["full_attention"] * self._shape.layers
        for layer in self._shape.sizes:
            if times[layer] != 1:
                raise _WrongError(
                    f"layer {layer} attends {times[layer]} times a step through the paged cache, expected once"
                )
        for call in attended:
            window = call.options.window
            if window is None and kinds[call.layer] == "sliding_attention":
                raise _WrongError(f"layer {call.layer} has a sliding window by its config, but attends without one")
            if window is not None and not self._shape.slides:
                raise _WrongError(f"layer {call.layer} attends with a window, but its config has none")
            options = replace(call.options, softcap=None) if self._shape.capped else call.options
            if (self._shape.plain or self._shape.capped) and not options.is_plain:
                raise _WrongError(f"layer {call.layer} bounds or biases scores, or has sinks, where none are planned")


def _shares(model: PreTrainedModel, ranks: int) -> list[tuple[PreTrainedModel, Group]]:
    return [(_share(model, group), group) for group in ThreadGroup.of_size(ranks)]


def _share(model: PreTrainedModel, group: Group) -> PreTrainedModel:
    """Returns one rank's share of a model, as created by loading."""
    share = copy.deepcopy(model)
    weights = dict(model.state_dict())
    cuts = shard(share, group)
    weights |= {name: cut.of(weights[name]).contiguous() for name, cut in cuts.items()}
    share.load_state_dict(weights, assign=True)
    return share.requires_grad_(False)
