"""Summarizes the turns of `pipeline.py` by arm and concurrency, and by pair of arms."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.endpoint_client import Tally
from tools.bench.latencies import Batch, Speedup, speedup


@dataclass(frozen=True, slots=True)
class Work:
    """Activity of a server's actors during a turn."""

    guess_hits: int  # verdicts that match a block drafted ahead
    guess_misses: int
    steps: int  # target steps, including prefill
    step_s: float  # total seconds in steps, measured in the target's loop
    gaps_s: tuple[float, ...]  # seconds from the end of each step to the start of the next


@dataclass(frozen=True, slots=True)
class Turn:
    """Batch measured under an arm; `batch.repeat` is the round."""

    batch: Batch
    work: Work | None  # None for `generate`, or if the turn outlasted the target's recording
    idle_cpu_s: float  # CPU seconds of the idle servers during the turn


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one arm at one concurrency; None if undefined for the arm."""

    arm: str
    concurrency: int
    tokens_per_s: float  # median of the rounds
    round_tokens_per_s: tuple[float, ...]
    acceptance_rate: float | None
    tokens_per_verify: float | None
    block_tokens: float | None  # mean length of verified blocks
    verifies_with_block: float | None  # share
    guess_hits: float | None  # share of verdicts, among those with lookahead drafts
    step_s: float | None  # mean seconds of a target step
    tokens_per_step: float | None
    gap_s: float | None  # median seconds between two steps
    target_busy: float | None  # share of time with the target in a step, over turns with `work`


def cells_of(turns: Sequence[Turn]) -> list[Cell]:
    groups: dict[tuple[int, str], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.batch.concurrency, turn.batch.arm), []).append(turn)
    return [_cell(group) for group in groups.values()]


def _cell(turns: Sequence[Turn]) -> Cell:
    batches = [turn.batch for turn in turns]
    known = [(turn.batch, turn.work) for turn in turns if turn.work is not None]
    works = [work for _, work in known]
    tally = sum((batch.tally for batch in batches), Tally())
    seconds = sum(batch.seconds for batch, _ in known)
    hits = sum(work.guess_hits for work in works)
    steps = sum(work.steps for work in works)
    step_s = sum(work.step_s for work in works)
    gaps = [gap for work in works for gap in work.gaps_s]
    rounds = tuple(_tokens_per_s(batches, number) for number in sorted({batch.repeat for batch in batches}))
    return Cell(
        arm=batches[0].arm,
        concurrency=batches[0].concurrency,
        tokens_per_s=statistics.median(rounds),
        round_tokens_per_s=rounds,
        acceptance_rate=tally.acceptance_rate,
        tokens_per_verify=_share(tally.tokens, tally.verifies),
        block_tokens=_share(tally.drafted, tally.blocks),
        verifies_with_block=_share(tally.blocks, tally.verifies),
        guess_hits=_share(hits, hits + sum(work.guess_misses for work in works)),
        step_s=_share(step_s, steps),
        tokens_per_step=_share(sum(batch.tally.tokens for batch, _ in known), steps),
        gap_s=statistics.median(gaps) if gaps else None,
        target_busy=step_s / seconds if works else None,
    )


def _tokens_per_s(batches: Sequence[Batch], number: int) -> float:
    """Returns the throughput of round `number`."""
    found = [batch for batch in batches if batch.repeat == number]
    return sum(answer.tokens for batch in found for answer in batch.answers) / sum(batch.seconds for batch in found)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def speedups_of(turns: Sequence[Turn], ratios: Iterable[tuple[str, str]]) -> list[Speedup]:
    """Returns the speedup of each pair in `ratios`, at each concurrency with results for both arms."""
    groups: dict[tuple[int, str], list[Batch]] = {}
    for turn in turns:
        groups.setdefault((turn.batch.concurrency, turn.batch.arm), []).append(turn.batch)
    at_once = dict.fromkeys(concurrency for concurrency, _ in groups)
    return [
        speedup(groups[concurrency, arm], groups[concurrency, base])
        for arm, base in ratios
        for concurrency in at_once
        if (concurrency, arm) in groups and (concurrency, base) in groups
    ]


def idle_share(turns: Sequence[Turn]) -> float:
    """Returns the share of one core that the idle servers used."""
    return sum(turn.idle_cpu_s for turn in turns) / sum(turn.batch.seconds for turn in turns)
