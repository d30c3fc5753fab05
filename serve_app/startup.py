"""Starts replicas: downloads, loads and measures models, selects engines, addresses and logging.

Slow work runs in a thread or a rank, with a time limit: Serve would wait forever for a hanging start, but replaces a
replica after a failed start.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import ray
from ray.util import get_current_placement_group

from actors.drafters.heads.files import head_folder
from actors.drafters.loading import published_acceptance
from actors.drafters.pass_profile import profile_drafting
from actors.drafters.registry import (
    DraftSetup,
    OtherTarget,
    capture_spec,
    check_shared_vocabulary,
    create_method,
    state_bounds,
    states_format,
)
from actors.drafters.translation.pairing import pool_pairing
from actors.engine.executor import Engine
from actors.engine.huge_pages import use_huge_pages
from actors.engine.memory import step_logit_rows
from actors.engine.process import device_of, run_on, use_cpu
from actors.engine.tensor_parallel import RankGroup, RankReport, RankSpec
from actors.grammars import grammars_of, load_grammar_vocabulary
from actors.learning.conversations import read_examples
from actors.learning.evaluation import do_nothing
from actors.learning.examples import ExampleStore, StateRecorder
from actors.learning.head_loading import head_learning, states_kind
from actors.learning.reload import CONFIGURED, LearnedDraft, Version
from actors.learning.spare_time import SpareTime
from actors.learning.trainable import fingerprint_of
from actors.learning.trainer import Draft, Trainer
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import (
    check_tensor_parallel,
    checkpoint_fingerprint,
    end_ids,
    load_tokenizer,
    local_folder,
    vocabulary,
    vocabulary_fingerprint,
)
from actors.vllm_engine.engine import VllmEngine
from cluster.config import DraftPool, SlipstreamConfig, TargetPool, of_drafters
from cluster.config_sections import HEADS, TrustConfig
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.method import DraftingMethod, ExchangesWeights, LimitsStates
from cluster.drafting.session_table import DrafterLimits
from cluster.errors import EngineError
from cluster.learning import Example
from cluster.page_allocator import SessionMemory
from cluster.routing.ray_membership import NODE, ZONE
from cluster.verification.scheduler import VerificationLimits
from protos.messages import Identity, StatesFormat

log = logging.getLogger(__name__)


class WatchedEngine(Engine, Protocol):
    """A replica's engine, with measured step costs and failure detection."""

    step_cost: ForwardCost
    reports: tuple[RankReport, ...]  # one per rank of our own engine; empty for vLLM
    pids: tuple[int, ...]

    async def watch(self) -> NoReturn:
        """Raises EngineError once the engine is no longer usable."""
        ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    engine: WatchedEngine
    limits: VerificationLimits
    memory: SessionMemory | None = None  # None: the scheduler estimates it


def engine_of(pool: TargetPool, replica: int) -> str:
    """Returns the engine of the replica with this rank in its pool.

    Serve numbers ranks from 0 and reuses a rank after its replica has ended. During an update, new replicas get higher
    ranks before the old ones end, so a mixed pool may drift to one engine.
    """
    if pool.engine == "mixed":
        return ("slipstream", "vllm")[replica % 2]
    return pool.engine


async def start_engine(config: SlipstreamConfig, folder: Path, tokens: Mapping[int, str], engine: str) -> StartedEngine:
    """Loads the target. Raises ModelError for an unsupported model and EngineError for a failed start."""
    start = _start_vllm if engine == "vllm" else _start_ranks
    return await start(config, folder, max(tokens) + 1)


async def _start_ranks(config: SlipstreamConfig, folder: Path, vocabulary: int) -> StartedEngine:
    pool = config.target
    check_tensor_parallel(folder, pool.tensor_parallel)
    capture = capture_spec(config.draft, folder, config.model.dtype)
    spec = RankSpec(
        folder=str(folder),
        vocabulary=vocabulary,
        dtype=config.model.dtype,
        sessions=pool.max_sessions,
        context=config.model.max_context,
        cache=pool.cache_per_rank,
        resources=pool.resources_per_rank,
        ranks=pool.tensor_parallel,
        logit_rows=step_logit_rows(pool.max_sessions, config.speculation.draft_tokens, pool.max_step_tokens),
        capture=capture,
        invariant=config.model.numerics == "invariant",
    )
    run_on(pool.resources_per_rank.cpu_affinity)  # a single core for verdicts and plans between forwards
    ranks = await RankGroup.start(spec, get_current_placement_group())
    limits = _limits(
        config,
        vocabulary,
        pages=ranks.pages,
        page_size=spec.cache.page_size,
        trees=ranks.takes_trees,
        states=capture.format if capture is not None else None,
        keeps_states=config.draft.states.keep,
    )
    return StartedEngine(ranks, limits)


async def _start_vllm(config: SlipstreamConfig, folder: Path, vocabulary: int) -> StartedEngine:
    use_cpu(config.target.resources_per_rank)
    capture = capture_spec(config.draft, folder, config.model.dtype)
    engine = await VllmEngine.start(config, str(folder), vocabulary, capture)
    memory = engine.memory
    limits = _limits(
        config,
        vocabulary,
        pages=memory.pages,
        page_size=memory.page_size,
        trees=False,
        own_draws_only=True,
        states=capture.format if capture is not None else None,
    )
    return StartedEngine(engine, limits, memory)


def _limits(config: SlipstreamConfig, vocabulary: int, **engine_limits: Any) -> VerificationLimits:
    pool = config.target
    return VerificationLimits(
        vocabulary=vocabulary,
        max_context=config.model.max_context,
        max_sessions=pool.max_sessions,
        max_step_tokens=pool.max_step_tokens,
        adapters=frozenset(pool.adapters),
        **engine_limits,
    )


def start_trainer(config: SlipstreamConfig, is_stopping: threading.Event) -> Trainer:
    """Returns a trainer for the configured draft. Raises ConfigError or ModelError."""
    learning = config.draft.learning
    assert learning is not None, "a trainer requires a draft that learns"
    target = local_folder(config.model.target, with_weights=False)
    draft = Draft(
        folder=_draft_folder(config.draft),
        method=config.draft.model_method,
        target=checkpoint_fingerprint(target),
        draft_tokens=config.speculation.draft_tokens,
        device=device_of(learning.resources),
        head=head_learning(config.draft, config.model.target) if config.draft.model_method in HEADS else None,
    )
    replay: list[Example] = []
    if learning.replay is not None:
        replay = read_examples(Path(learning.replay).expanduser(), load_tokenizer(target), end_ids(target))
    pause = SpareTime(is_stopping.wait).pause if learning.resources.background else do_nothing
    return Trainer(learning, draft, replay, should_stop=is_stopping.is_set, pause=pause)


Started = TypeVar("Started")


async def with_start_timeout(limit_s: float, key: str, starting: Awaitable[Started]) -> Started:
    """Awaits a start and returns its result. After `limit_s`, raises EngineError that names the configuration `key`.

    A thread continues after the limit, so the process must then exit.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await starting
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EngineError(
            f"the model was not loaded and measured within {limit_s:g} s, so Serve replaces this replica; raise {key}"
            " if loading takes that long, else look for a hanging process or disk"
        ) from error


LOOPBACK = "127.0.0.1"
ZONE_LABEL = "ray.io/availability-zone"  # Ray sets it from RAY_NODE_ZONE


def location() -> dict[str, str]:
    """Returns the replica's node and zone, used to choose drafters near their targets."""
    context = ray.get_runtime_context()
    return {NODE: context.get_node_id(), ZONE: str(context.get_node_labels().get(ZONE_LABEL, ""))}


def listening_host(trust: TrustConfig) -> str:
    """Returns the bind address: loopback on a single machine without credentials, else the node's address.

    With several machines and no credentials, the server then refuses to start.
    """
    here = ray.util.get_node_ip_address()
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if trust.is_off and machines == {here} else str(here)


PACKAGES = ("cluster", "actors", "serve_app")
SERVE = "ray.serve"


def log_under_serve(packages: Iterable[str] = PACKAGES, parent: str = SERVE) -> None:
    """Passes our log records to Serve's handlers. Call it in a replica, after Serve has set up its logger."""
    for package in packages:
        logging.getLogger(package).parent = logging.getLogger(parent)


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The target's local checkpoint, without weights for drafters."""

    folder: Path
    tokens: Mapping[int, str]
    vocabulary_print: str
    model_print: str


def _target_files(model: str, with_weights: bool) -> TargetFiles:
    """Downloads missing files, and reads the checkpoint's fingerprints."""
    folder = local_folder(model, with_weights)
    tokens = vocabulary(folder)
    return TargetFiles(folder, tokens, vocabulary_fingerprint(tokens), checkpoint_fingerprint(folder))


async def start_target(config: SlipstreamConfig, engine: str) -> tuple[TargetFiles, StartedEngine]:
    """Starts the target's engine. Raises ModelError for an unsupported model, EngineError for a failed start."""
    files = await asyncio.to_thread(_target_files, config.model.target, with_weights=True)
    return files, await start_engine(config, files.folder, files.tokens, engine)


@dataclass(frozen=True, slots=True)
class StartedDrafter:
    """A loaded drafting method with its limits, costs and acceptance."""

    models: Mapping[str, Identity]  # the targets' identities, by model name
    method: DraftingMethod
    limits: DrafterLimits
    costs: DraftCost
    first_token_acceptance: float | None  # published with the draft, or measured when the version was learned
    learned: LearnedDraft | None = None
    version: int = CONFIGURED
    recorder: StateRecorder | None = None  # None: the draft does not learn from hidden states
    is_translated: bool = False  # the draft has another tokenizer than the target


def start_drafter(models: Sequence[SlipstreamConfig]) -> StartedDrafter:
    """Loads and measures the drafting method. Raises ModelError if it does not match every model's target."""
    config = of_drafters(models)
    targets = {one.model.name: _target_files(one.model.target, with_weights=False) for one in models}
    files, *others = targets.values()
    check_shared_vocabulary(config.draft, {name: one.vocabulary_print for name, one in targets.items()})
    identities = {name: Identity(one.vocabulary_print, one.model_print) for name, one in targets.items()}
    states = states_format(config.draft, files.folder)
    bounds = state_bounds(config.draft, files.folder)
    grammars = grammars_of(partial(load_grammar_vocabulary, files.folder))
    recorder = None if states is None else state_recorder(config.draft, files.folder, states)
    setup = DraftSetup(
        dtype=config.model.dtype,
        max_context=config.model.max_context,
        draft_tokens=config.speculation.draft_tokens,
        target_tokens=files.tokens,
        target=config.model.target,
        states=states,
        processor_factories=() if grammars is None else (grammars.draft_masking,),
        recorder=recorder,
        others={one.model.name: OtherTarget(one.model.target, targets[one.model.name].tokens) for one in models[1:]},
    )
    max_sessions = config.draft.max_sessions
    vocabulary = max(max(one.tokens) for one in targets.values()) + 1
    learned = learned_draft(config.draft, files.model_print)
    method = create_method(config.draft, setup)
    if isinstance(method, LimitsStates):
        bounds = bounds.with_room(method.max_states)
    limits = DrafterLimits(vocabulary, config.model.max_context, max_sessions, states, bounds)
    is_translated = config.draft.model_method == "draft_model" and (
        pool_pairing(config.draft, [one.tokens for one in targets.values()]).is_translated
    )
    if learned is None:
        number = CONFIGURED
        # The figure was published for the draft's own target.
        figure = None if is_translated or others else published_acceptance(config.draft)
    else:
        version = _use_current(learned, method)
        number, figure = version.number, version.first_token_acceptance
    if config.draft.resources.num_gpus == 0:
        use_huge_pages()
    costs = profile_drafting(method, limits)
    return StartedDrafter(identities, method, limits, costs, figure, learned, number, recorder, is_translated)


def state_recorder(draft: DraftPool, target: Path, layout: StatesFormat) -> StateRecorder | None:
    """Starts keeping the hidden states of sessions that a head may learn from; None if the draft does not learn."""
    if draft.learning is None:
        return None
    return StateRecorder(partial(ExampleStore.of, draft.learning), states_kind(draft, target), layout.row_bytes)


def learned_draft(draft: DraftPool, target: str) -> LearnedDraft | None:
    """Returns the draft's learned versions for a target fingerprint; None if the draft does not learn."""
    if draft.learning is None:
        return None
    folder = _draft_folder(draft)
    configured = Version(CONFIGURED, folder, published_acceptance(draft))
    versions = VersionFolder(Path(draft.learning.folder).expanduser())
    return LearnedDraft(versions, configured, target, fingerprint_of(folder))


def _draft_folder(draft: DraftPool) -> Path:
    """Returns the folder of the configured draft, downloading it if needed."""
    assert draft.model is not None, "learning requires a draft model"
    return head_folder(draft) if draft.model_method in HEADS else local_folder(draft.model)


def _use_current(learned: LearnedDraft, method: DraftingMethod) -> Version:
    """Exchanges the configured draft for the current version, with the same checks as later; returns the one in use."""
    assert isinstance(method, ExchangesWeights), "the configuration refuses other methods"
    try:
        if (number := learned.current()) != CONFIGURED:
            version = learned.find(number)
            method.prepare_weights(version.folder)()
            return version
    except Exception as error:  # noqa: BLE001  # `DraftReload` finds the same fault, logs it and counts it
        log.info("starting with the configured draft: %s", error)
    return learned.configured
