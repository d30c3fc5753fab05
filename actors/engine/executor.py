"""Executes the target's steps on one rank: rows in, decisions out. Sampling and acceptance run on the logits' device.

The executor stores the tokens fed for each session. It knows neither a row's purpose nor the owners of cache pages.
`Engine` is its asynchronous interface, with one awaitable call per step. `within` is a timeout that excludes time
during which this process was suspended.
"""

import asyncio
import math
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow, to_device
from actors.engine.runner import Runner
from actors.grammars import GrammarCompiler
from actors.sampling.acceptance import BlockDecision, DrawAddress, PendingBlock, decide, decided_in_step, draws_of
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, ProcessorChain, ProcessorFactory, chain_of
from actors.sampling.scoring import decided_scores, margin, score
from cluster.verification.step import Outcome, Row, StateRead, StepPlan, with_states_of_rows
from protos.messages import Open, TokenScore


@dataclass(slots=True)
class _SessionState:
    open: Open
    tokens: list[int]  # committed text, then fed tokens that are still cached
    chain: ProcessorChain | None
    prompt_scores: list[TokenScore] | None = None  # from the second prompt token on; None: not requested

    def scored(self, row: Row) -> tuple[int, ...]:
        """Returns the prompt tokens to score with this row's logits; empty if no scores are requested."""
        if self.prompt_scores is None:
            return ()
        return self.open.tokens[row.start + 1 : min(row.base_len + 1, self.open.prompt_len)]

    def reads_logits(self, row: Row) -> bool:
        """Returns whether scores or an audit's margin are computed from this row's logits."""
        is_read = self.open.scoring.top is not None or self.open.rival is not None
        return (row.decide and is_read) or bool(self.scored(row))


class StepExecutor:
    """Runs step plans on a `Runner`. Ids >= `vocabulary` are padding of the model's embedding and are never drawn."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: int,
        processor_factories: tuple[ProcessorFactory, ...] = PROCESSOR_FACTORIES,
        grammars: GrammarCompiler | None = None,  # None: grammars are not supported
    ) -> None:
        self._runner = runner
        self._factories = (
            processor_factories if grammars is None else (*processor_factories, grammars.masking)
        )  # factories of logits processors
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._sessions: dict[str, _SessionState] = {}

    def read(self, read: StateRead) -> bytes:
        """Reads hidden states from pages, without a forward."""
        return self._runner.read_states(read.slots)

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Closes and opens sessions, feeds the rows and decides; returns one outcome per deciding row, in row order."""
        for name in plan.closes:
            del self._sessions[name]
        for request in plan.opens:
            assert request.session not in self._sessions, f"session {request.session} is open already"
            self._sessions[request.session] = self._opened(request)
        if not plan.rows:
            return []
        feeds = [self._feed(row) for row in plan.rows]
        rows = [row for row in plan.rows if row.decide]
        blocks = [self._block(row) for row in rows]
        at = _deciding_positions(plan.rows, feeds)
        draws = draws_of(blocks, at, self._needs_logits(plan.rows, blocks))
        output = self._runner.forward(feeds, plan.copies, moves=plan.moves, draws=draws)
        if output.drawn is not None and not draws.needs_logits:
            return self._outcomes(rows, blocks, decided_in_step(blocks, output.drawn), output.logits)
        logits = output.logits[:, : self._vocabulary]
        tokens = None if output.drawn is None else output.drawn[:, 0]
        if len(at) < len(logits):
            self._score_prompts(plan.rows, feeds, logits)
            (indices,) = to_device([at], logits.device)
            logits = logits.index_select(0, indices)
            tokens = None if tokens is None else tokens.index_select(0, indices)
        return self._outcomes(rows, blocks, decide(blocks, logits, tokens), logits)

    def _opened(self, request: Open) -> _SessionState:
        is_begun = len(request.tokens) > request.prompt_len  # the prompt's scores were sent with the first tokens
        scores: list[TokenScore] | None = None if request.scoring.prompt_top is None or is_begun else []
        return _SessionState(request, list(request.tokens), chain_of(request, self._factories), scores)

    def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar for a future session; returns an error message, or None on success. Safe during a step."""
        return "the target supports none" if self._grammars is None else self._grammars.fault(grammar)

    @property
    def is_idle(self) -> bool:
        return not self._sessions

    def _feed(self, row: Row) -> InputRow:
        session = self._sessions[row.session]
        end = row.start + len(row.tokens)
        assert row.start <= len(session.tokens), "a row starts beyond what is cached"
        session.tokens[row.start : end] = row.tokens
        parents = () if row.draft.is_chain else row.draft.parents
        logits = len(row.tokens) if session.scored(row) else row.deciding
        return InputRow(row.tokens, row.start, logits, row.pages, parents)

    def _needs_logits(self, rows: Sequence[Row], blocks: Sequence[PendingBlock]) -> bool:
        """Returns whether logits of the step are read: for filters, logits processors, rejection sampling, scores or
        margins.

        All other rows need only drawn tokens. Then, tensor-parallel ranks do not gather logits.
        """
        are_drawn = all(block.is_drawn_in_step for block in blocks)
        return not are_drawn or any(self._sessions[row.session].reads_logits(row) for row in rows)

    def _score_prompts(self, rows: Sequence[Row], feeds: Sequence[InputRow], logits: Tensor) -> None:
        """Records scores of prompt tokens."""
        parts = torch.split(logits, [feed.logits for feed in feeds])
        for row, part in zip(rows, parts, strict=True):
            session = self._sessions[row.session]
            if tokens := session.scored(row):
                top = session.open.scoring.prompt_top or 0
                scores = score(part[: len(tokens)], tokens, [top] * len(tokens))
                assert session.prompt_scores is not None, "prompt scores were not requested"
                session.prompt_scores[row.start :] = scores  # replaced: tokens are fed again after a loss of pages

    def _outcomes(
        self,
        rows: Sequence[Row],
        blocks: Sequence[PendingBlock],
        decisions: Sequence[BlockDecision],
        logits: Tensor,
    ) -> list[Outcome]:
        """Commits decisions to the sessions' texts, and adds scores and margins from the logits of their positions."""
        tops = [self._sessions[row.session].open.scoring.top for row in rows]
        scores = decided_scores(blocks, decisions, tops, logits)
        outcomes = []
        at = 0
        for row, block, decision, row_scores in zip(rows, blocks, decisions, scores, strict=True):
            session = self._sessions[row.session]
            prompt_scores = tuple(session.prompt_scores or ())
            first = at
            at += block.positions
            session.tokens[block.at.position :] = [row.draft.tokens[node] for node in decision.path]
            if not decision.is_finite or any(math.isnan(score.logprob) for score in prompt_scores):
                outcomes.append(Outcome(row.session, (), 0, is_finite=False))
                continue
            session.prompt_scores = None  # sent once
            rival = session.open.rival
            outcomes.append(
                Outcome(
                    row.session,
                    decision.path,
                    decision.next_token,
                    None if rival is None else margin(logits[first], block.sampling, block.chain, block.at, rival),
                    scores=row_scores,
                    prompt_scores=prompt_scores,
                )
            )
        return with_states_of_rows(rows, outcomes, self._runner.read_states)

    def _block(self, row: Row) -> PendingBlock:
        session = self._sessions[row.session]
        request = session.open
        base_len = row.base_len
        if session.chain is not None:
            session.chain.follow(session.tokens, base_len)
        return PendingBlock(
            rule=request.acceptance,
            sampling=request.sampling,
            draft=row.draft,
            chain=session.chain,
            at=DrawAddress(request.seed, request.choice, base_len),
        )


def _deciding_positions(rows: Sequence[Row], feeds: Sequence[InputRow]) -> list[int]:
    """Returns the indices of the positions that decide, among all positions with logits."""
    indices: list[int] = []
    end = 0
    for row, feed in zip(rows, feeds, strict=True):
        end += feed.logits
        indices += range(end - row.deciding, end)
    return indices


CHECK_PERIOD_S = 1.0  # seconds between checks; one suspension counts at most this long


Done = TypeVar("Done")


async def within(limit_s: float, work: Awaitable[Done]) -> Done:
    """Returns the result of `work`. Cancels it and raises TimeoutError if it takes longer than `limit_s` seconds.

    A suspension of the process or the machine counts only CHECK_PERIOD_S, because the result may be ready but unread.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    left_s = limit_s
    is_expired = False
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal left_s, is_expired, timer
        left_s -= CHECK_PERIOD_S
        if left_s < 0:
            is_expired = True
            task.cancel()
        else:
            timer = loop.call_later(min(left_s, CHECK_PERIOD_S), check)

    timer = loop.call_later(min(left_s, CHECK_PERIOD_S), check)
    try:
        return await task
    except asyncio.CancelledError:
        if not is_expired:
            raise
        raise TimeoutError(f"no result within {limit_s:.3g} s") from None
    finally:
        timer.cancel()
        task.cancel()


class Engine(Protocol):
    """Executes one step plan at a time, off the event loop."""

    def step(self, plan: StepPlan) -> Awaitable[list[Outcome]]:
        """Starts a plan and returns its outcomes, which raise EngineError if the engine is no longer usable."""
        ...

    async def read(self, read: StateRead) -> bytes:
        """Reads hidden states from the cache between two steps; raises as `step` does."""
        ...

    async def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar before its session's first step; returns an error message, or None on success.

        Steps may run concurrently. Raises as `step` does.
        """
        ...

    async def close(self) -> None: ...


class ThreadEngine:
    """Runs an executor on a thread of this process."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def step(self, plan: StepPlan) -> Awaitable[list[Outcome]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._executor.step, plan)

    async def read(self, read: StateRead) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._executor.read, read)

    async def prepare(self, grammar: str) -> str | None:
        return await asyncio.to_thread(self._executor.prepare, grammar)

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
