"""Measures the Python cost of a target's step, without a model and without a network.

    python benchmarks/host_cost.py --sessions 1,16,64,256 --json host_cost.json

Every session gets a block in every step, and the target accepts each draft token with probability 0.7. Time is virtual,
so the controller sees the steps of an 8B model on a GPU. The parts are those of one step of the coordinator, in
milliseconds (medians):

* decode, receive: the drafter's frame becomes messages, and the scheduler stores their blocks;
* plan, send plan: the scheduler plans the step, and the plan is encoded for the rank;
* rank: the rank decodes the plan, builds the tensor for its followers, and encodes the outcomes;
* outcomes, apply: the coordinator decodes the outcomes and applies them;
* encode: the verdicts are encoded for the drafter and the router.

`outcome to plan` is the time between two forward passes: outcomes, apply, plan and send plan.
"""

import argparse
import gc
import json
import pickle
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.compute.kv_cache import InputRow
from actors.engine.tensor_parallel import to_tensor
from cluster.costs import ForwardCost
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome, StepPlan
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.draft_tree import DraftTree
from protos.messages import GREEDY, Acceptance, Attach, Block, DraftRequest, Message, Open, Verdict
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
CRITICAL = ("outcomes", "apply", "plan", "send plan")


class Stopwatch:
    """Collects the durations of named parts, in seconds."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)


class Step:
    """A target's scheduler with its peers and a scripted rank."""

    def __init__(self, sessions: int) -> None:
        limits = VerificationLimits(VOCABULARY, MAX_LEN, sessions, PREFILL_TOKENS + 8 * sessions, pages=sessions * MAX_LEN // 16)
        self.scheduler = VerificationScheduler(limits, step_cost=STEP_COST)
        self.now = 0.0
        self._random = random.Random(1)
        self._requests: dict[str, DraftRequest] = {}
        for index in range(sessions):
            name = f"session-{index:04d}-{index * 7919:08x}"
            tokens = (*PROMPT[:-1], 600 + index)
            opened = Open(name, 1, tokens, len(tokens), MAX_LEN, (2,), GREEDY, 1, 0, 7 + index, Acceptance.COUPLED, DRAFT_TOKENS)
            self.scheduler.receive(ROUTER, opened, self.now)
            prefix = Prefix(7 + index, tokens)
            self._note(self.scheduler.receive(DRAFTER, Attach(name, prefix.length, prefix.hash), self.now))

    def run(self, watch: Stopwatch) -> None:
        """Runs one step."""
        blocks = [self._block(request) for request in self._requests.values() if request.max_tokens]
        frame = encode(pb.DrafterToTarget, blocks).SerializeToString()
        with watch.part("decode"):
            decoded = decode(pb.DrafterToTarget.FromString(frame))
        with watch.part("receive"):
            for message in decoded.messages:
                self.scheduler.receive(DRAFTER, message, self.now)
        self.now = max(self.now, self.scheduler.next_due() or 0.0)  # a step may wait for late blocks
        with watch.part("plan"):
            plan = self.scheduler.plan(self.now)
        assert plan is not None, "no session is due"
        with watch.part("send plan"):
            data = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
        with watch.part("rank"):
            self._tensor(pickle.loads(data))
        outcomes = self._outcomes(plan)
        with watch.part("rank"):
            data = pickle.dumps(outcomes, protocol=pickle.HIGHEST_PROTOCOL)
        seconds = STEP_COST.seconds(len(plan.rows), sum(len(row.tokens) for row in plan.rows))
        self.now += seconds
        with watch.part("outcomes"):
            outcomes = pickle.loads(data)
        with watch.part("apply"):
            sends = self.scheduler.apply(outcomes, seconds, self.now)
        to_drafter = [message for peer, message in sends if peer == DRAFTER]
        to_router = [message for peer, message in sends if peer == ROUTER]
        with watch.part("encode"):
            encode(pb.TargetToDrafter, to_drafter).SerializeToString()
            encode(pb.TargetToRouter, to_router).SerializeToString()
        self._note(sends)
        self.now += 1e-4

    def _note(self, sends: list[tuple[str, Message]]) -> None:
        for peer, message in sends:
            if isinstance(message, DraftRequest):
                self._requests[message.session] = message
            elif isinstance(message, Verdict) and peer == DRAFTER:
                self._requests.pop(message.session, None)

    def _block(self, request: DraftRequest) -> Block:
        tokens = tuple(self._random.randrange(10, VOCABULARY) for _ in range(request.max_tokens))
        return Block(request.session, request.base_len, request.prefix_hash, DraftTree.chain(tokens))

    def _tensor(self, plan: StepPlan) -> None:
        to_tensor([InputRow(row.tokens, row.start, row.deciding, row.pages) for row in plan.rows], plan.copies)

    def _outcomes(self, plan: StepPlan) -> list[Outcome]:
        outcomes = []
        for row in plan.rows:
            if not row.decide:
                continue
            accepted = 0
            while accepted < row.drafted and self._random.random() < ACCEPTED:
                accepted += 1
            outcomes.append(Outcome(row.session, tuple(range(accepted)), self._random.randrange(10, VOCABULARY)))
        return outcomes


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
    parts = {name: 1e3 * sum(seconds) / steps for name, seconds in watch.seconds.items() if len(seconds) > steps}
    parts |= {name: 1e3 * statistics.median(seconds) for name, seconds in watch.seconds.items() if name not in parts}
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
