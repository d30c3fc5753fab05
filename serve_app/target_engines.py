"""Which engine a target replica computes with: the project's own ranks, or vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ray.util import get_current_placement_group

from actors.drafters.registry import capture_spec
from actors.engine.base import Engine
from actors.engine.process import run_on, use_cpu
from actors.engine.tensor_parallel import RankGroup, RankReport, RankSpec
from actors.models.checkpoint import check_tensor_parallel
from actors.vllm_engine.engine import VllmEngine
from cluster.config import SlipstreamConfig, TargetPool
from cluster.costs import ForwardCost
from cluster.engines.session_memory import SessionMemory
from cluster.verification.limits import VerificationLimits


class WatchedEngine(Engine, Protocol):
    """An engine of a replica: it says what steps cost, and when it has failed."""

    step_cost: ForwardCost
    reports: tuple[RankReport, ...]  # of ranks that are the project's own
    pids: tuple[int, ...]

    async def watch(self) -> NoReturn:
        """Raises EngineError once the engine is no longer usable."""
        ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    engine: WatchedEngine
    limits: VerificationLimits
    memory: SessionMemory | None = None  # None: the scheduler's own


def engine_of(pool: TargetPool, replica: int) -> str:
    """Of a pool's replica with this rank, as it is at the replica's start.

    Serve counts ranks from 0 and frees one once its replica has ended. Who starts before that, as in an update, has
    another: a mixed pool is mixed when it is deployed, and may drift to one engine afterwards.
    """
    if pool.engine == "mixed":
        return ("slipstream", "vllm")[replica % 2]
    return pool.engine


async def start_engine(config: SlipstreamConfig, folder: Path, tokens: Mapping[int, str], engine: str) -> StartedEngine:
    """Loads the target; raises ModelError for what cannot be served, EngineError for what fails."""
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
        capture=capture,
    )
    run_on(pool.resources_per_rank.cpu_affinity)  # verdicts and plans are between two forwards, beside the ranks
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


def _limits(config: SlipstreamConfig, vocabulary: int, **of_engine: Any) -> VerificationLimits:
    pool = config.target
    return VerificationLimits(
        vocabulary=vocabulary,
        max_context=config.model.max_context,
        max_sessions=pool.max_sessions,
        max_step_tokens=pool.max_step_tokens,
        **of_engine,
    )
