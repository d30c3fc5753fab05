"""Measures the Python cost of a target's step without a model or a network.

    python benchmarks/host_cost.py --sessions 1,16,64,256 --json host_cost.json

Every session gets a block in every step, and the target accepts each draft token with probability 0.7. Time is virtual,
so the controller sees the steps of an 8B model on a GPU. The parts are those of one step of the coordinator, in
milliseconds (medians):

* decode, receive: the drafter's frame becomes messages, and the scheduler stores their blocks;
* plan, send plan: the scheduler plans the step, and the plan is encoded for the rank;
* rank: the rank decodes the plan, encodes the forward for its followers, packs it for the device, decides the blocks
  from the drawn tokens, and encodes the outcomes;
* outcomes, commit: the coordinator decodes the outcomes and commits their tokens;
* settle: while the rank computes, the coordinator makes the verdicts, and updates statistics and draft requests;
* encode: the verdicts are encoded for the drafter and the router.

`outcome to plan` is the time between two forward passes: outcomes, commit, plan and send plan.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.attention import ScoreOptions, StepShape
from actors.attention.batch import PackedStep
from actors.attention.paged import Paged, StepTensors
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache, to_device
from actors.engine.executor import StepExecutor
from actors.engine.forward_codec import encode_forward
from actors.engine.static_step import Buckets, StepBuffer
from actors.engine.step_codec import StepDecoder, StepEncoder
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.costs import ForwardCost
from cluster.envelope import Send
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome, StepPlan
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.draft_tree import DraftTree
from protos.messages import Attach, Block, DraftRequest, Open
from protos.prefix import Prefix

DRAFTER = "drafter#1"
ROUTER = "router#1"
VOCABULARY = 32_000
PROMPT = tuple(range(1, 513))
DRAFT_TOKENS = 4
MAX_LEN = 4096
ACCEPTED = 0.7  # probability that a draft token is accepted
STEP_COST = ForwardCost(by_tokens=((1, 6e-3), (64, 7e-3), (256, 9e-3), (1280, 16e-3)))
WARM_UP_STEPS = 30
PREFILL_TOKENS = 8192
PAGE_SIZE = 16
CRITICAL = ("outcomes", "commit", "plan", "send plan")


class Stopwatch:
    """Collects the durations of named parts, in seconds."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)


def not_attending(step: StepTensors, query: Tensor, pool: Tensor, page_size: int, options: ScoreOptions) -> Tensor:
    raise NotImplementedError("only the host's work is measured")


class ScriptedRunner:
    """Prepares forwards as the leader of several ranks does, and draws scripted tokens instead of computing them."""

    vocabulary = VOCABULARY

    def __init__(self, sessions: int) -> None:
        self._cache = PagedCache(1, PAGE_SIZE, {0: LayerSize(1, 1)}, torch.bfloat16, torch.device("cpu"))
        self._backend = Paged(not_attending)
        self._buckets = Buckets.for_sessions(sessions, MAX_LEN, PAGE_SIZE, self._backend)
        self._buffers: dict[StepShape, StepBuffer] = {}
        self._random = random.Random(1)
        self.script_s = 0.0  # seconds that the last forward spent on its script

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        *,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        encode_forward(rows, copies, moves, draws)
        shape = self._buckets.shape(rows, draws)
        if shape is None:  # the step runs without padding
            to_device(PackedStep.exact(rows, self._cache, self._backend, draws).integers, self._cache.device)
        else:
            packed = PackedStep.padded(rows, self._cache, self._backend, shape, draws)
            if shape not in self._buffers:
                self._buffers[shape] = StepBuffer([len(part) for part in packed.integers], self._cache.device)
            self._buffers[shape].write(packed.integers)
        began = time.perf_counter()
        drawn = torch.tensor([each for row in rows for each in self._drawn(row)])
        self.script_s = time.perf_counter() - began
        return ForwardOutput(torch.empty(len(drawn), 0), None, drawn=drawn)

    def _drawn(self, row: InputRow) -> list[tuple[int, bool]]:
        """Returns the next token of the text, or another one that ends it, at every position with logits, and whether
        the tokens before are of the text.
        """
        following = [*row.tokens[len(row.tokens) - row.logits + 1 :], 0] if row.logits else []
        drawn = []
        is_reached = True
        for token in following:
            stays = bool(token) and self._random.random() < ACCEPTED
            drawn.append((token if stays else self._random.randrange(10, VOCABULARY), is_reached))
            is_reached = is_reached and stays
        return drawn

    def read_states(self, slots: Sequence[int]) -> bytes:
        raise NotImplementedError("no states are captured")


class Step:
    """A target's scheduler with a scripted rank and a drafter whose blocks arrive before the verdicts."""

    def __init__(self, sessions: int) -> None:
        limits = VerificationLimits(
            VOCABULARY, MAX_LEN, sessions, PREFILL_TOKENS + 8 * sessions, pages=sessions * MAX_LEN // PAGE_SIZE
        )
        self.scheduler = VerificationScheduler(limits, step_cost=STEP_COST)
        self.now = 0.0
        self._random = random.Random(1)
        self._encoder = StepEncoder()
        self._decoder = StepDecoder()
        self._runner = ScriptedRunner(sessions)
        self._executor = StepExecutor(self._runner, VOCABULARY)
        self._texts: dict[str, Prefix] = {}
        self._requested: dict[str, int] = {}  # draft length by session
        for index in range(sessions):
            name = f"session-{index:04d}-{index * 7919:08x}"
            tokens = (*PROMPT[:-1], 600 + index)
            opened = Open.measured(name, tokens, MAX_LEN, DRAFT_TOKENS)
            self.scheduler.receive(ROUTER, replace(opened, stop_ids=(2,)), self.now)
            text = self._texts[name] = Prefix(opened.hash_key, tokens)
            self._note(self.scheduler.receive(DRAFTER, Attach(name, text.length, text.hash), self.now))

    def run(self, watch: Stopwatch) -> None:
        """Runs one step, from its plan to the commit of its outcomes."""
        self.now = max(self.now, self.scheduler.next_due() or 0.0)
        with watch.part("plan"):
            plan = self.scheduler.plan(self.now)
        assert plan is not None, "no session is due"
        with watch.part("send plan"):
            data = self._encoder.step(plan)
        with watch.part("settle"):
            sends = self.scheduler.settle()
        to_drafter = [message for peer, message in sends if peer == DRAFTER]
        to_router = [message for peer, message in sends if peer == ROUTER]
        with watch.part("encode"):
            encode(pb.TargetToDrafter, to_drafter).SerializeToString()
            encode(pb.TargetToRouter, to_router).SerializeToString()
        self._note(sends)
        began = time.perf_counter()
        received = self._decoder.request(data)
        assert isinstance(received, StepPlan)
        outcomes = self._executor.step(received)
        data = self._decoder.outcomes(outcomes)
        watch.seconds["rank"].append(time.perf_counter() - began - self._runner.script_s)
        frame = encode(pb.DrafterToTarget, self._blocks(plan, outcomes)).SerializeToString()
        with watch.part("decode"):
            decoded = decode(pb.DrafterToTarget.FromString(frame))
        with watch.part("receive"):
            for message in decoded.messages:
                self.scheduler.receive(DRAFTER, message, self.now)
        seconds = STEP_COST.seconds(len(plan.rows), sum(len(row.tokens) for row in plan.rows))
        self.now += seconds
        with watch.part("outcomes"):
            outcomes = self._encoder.outcomes(data)
        with watch.part("commit"):
            self.scheduler.commit(outcomes, seconds, self.now)

    def _note(self, sends: list[Send]) -> None:
        for _, message in sends:
            if isinstance(message, DraftRequest):
                self._requested[message.session] = message.max_tokens

    def _blocks(self, plan: StepPlan, outcomes: list[Outcome]) -> list[Block]:
        """Returns the blocks for the resulting texts, as if drafted ahead of the verdicts."""
        rows = [row for row in plan.rows if row.decide]
        blocks = []
        for row, outcome in zip(rows, outcomes, strict=True):
            text = self._texts[row.session]
            text.extend(outcome.tokens_of(row))
            if count := self._requested.get(row.session, 0):
                tokens = tuple(self._random.randrange(10, VOCABULARY) for _ in range(count))
                blocks.append(Block(row.session, text.length, text.hash, DraftTree.chain(tokens)))
        return blocks


def measured(sessions: int, steps: int) -> dict[str, float]:
    """Returns the median milliseconds of each part, with the sums `outcome to plan` and `all`."""
    step = Step(sessions)
    for _ in range(WARM_UP_STEPS):
        step.run(Stopwatch())
    gc.collect()
    gc.freeze()
    watch = Stopwatch()
    for _ in range(steps):
        step.run(watch)
    gc.unfreeze()
    parts = {name: 1e3 * statistics.median(seconds) for name, seconds in watch.seconds.items()}
    return {**parts, "outcome to plan": sum(parts[name] for name in CRITICAL), "all": sum(parts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the Python cost of a target's step.")
    parser.add_argument("--sessions", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.sessions.split(",")]
    results = {count: measured(count, arguments.steps) for count in counts}
    table = Table("part", *map(str, results), title="ms a step, by sessions")
    for name in results[counts[0]]:
        table.add_row(name, *[f"{parts[name]:.3f}" for parts in results.values()])
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
