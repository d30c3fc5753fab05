"""Simulates both pools under a trace of arrivals second by second, with costs instead of models and the real policy.

Sessions spread evenly over replicas. A round is a target step plus the wait for blocks: one step hides drafting, and
targets wait at most another step before they continue without a block.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster.autoscaling import DRAFTER, TARGET, DraftReport, Observed, PoolsPolicy, TargetReport, as_numbers

LOOK_BACK_S = 10
TOKENS = 200  # per answer
PROMPT_TOKENS = 300


@dataclass(frozen=True)
class Costs:
    """Seconds of a target step and of a drafting pass, given their numbers of sessions."""

    step_s: float = 0.03
    step_row_s: float = 0.0005
    read_tokens: float = 4000.0  # prompt tokens per second
    pass_s: float = 0.005
    pass_row_s: float = 0.001
    accepted: float = 1.0  # accepted draft tokens per round with a timely block


@dataclass
class PoolState:
    """Running replicas of a pool, and starting ones with their start times."""

    least: int
    most: int
    max_sessions: int
    scaling: Mapping[str, Any]
    size: int = 0
    running: int = 0
    starting: list[int] = field(default_factory=list)  # seconds when starting replicas become ready
    state: Mapping[str, Any] = field(default_factory=dict)
    reports: deque[Any] = field(default_factory=lambda: deque(maxlen=LOOK_BACK_S))
    sizes: list[int] = field(default_factory=list)  # number of replicas, per second

    def resize(self, size: int, now: int, start_s: int) -> None:
        self.starting = [at for at in self.starting if at > now] + [now + start_s] * max(0, size - self.size)
        self.size = size
        self.starting = self.starting[: max(0, size - self.running)]

    def tick(self, now: int) -> None:
        self.running = self.size - len([at for at in self.starting if at > now])

    def observed(self, deployment: str, now: int, settings: Mapping[str, float]) -> Observed:
        """Returns the policy's input: the replicas' means over the look-back period, and their settings."""
        reports = [vars(report) for report in self.reports]
        means = {name: sum(one[name] for one in reports) / len(reports) for name in (reports[0] if reports else ())}
        values = {**means, **settings} if reports else {}
        metrics = {name: dict.fromkeys(range(self.running), value) for name, value in values.items()}
        return SimpleNamespace(
            deployment_name=deployment,
            aggregated_metrics=metrics,
            target_num_replicas=self.size,
            capacity_adjusted_min_replicas=self.least,
            capacity_adjusted_max_replicas=self.most,
            current_time=float(now),
            policy_state=self.state,
        )


def target_pool(least: int = 1, most: int = 4, max_sessions: int = 32, **scaling: Any) -> PoolState:
    defaults = {"sessions_per_replica": max_sessions / 2, "max_sessions": max_sessions, "first_token_s": 2.0}
    delays = {"up_delay_s": 10.0, "down_delay_s": 300.0}
    return PoolState(least, most, max_sessions, {**defaults, **delays, **scaling}, size=least, running=least)


def draft_pool(least: int = 1, most: int = 8, max_sessions: int = 64, **scaling: Any) -> PoolState:
    defaults = {"sessions_per_replica": max_sessions / 2, "per_target": None}
    delays = {"up_delay_s": 10.0, "down_delay_s": 300.0}
    return PoolState(least, most, max_sessions, {**defaults, **delays, **scaling}, size=least, running=least)


class PoolWorld:
    """Runs a trace; `rate` gives arrivals per second at each second."""

    def __init__(self, targets: PoolState, drafters: PoolState, costs: Costs, start_s: int = 20, seed: int = 7) -> None:
        self.targets = targets
        self.drafters = drafters
        self.speculates = True
        self.finished = 0
        self.now = 0
        self._costs = costs
        self._start_s = start_s
        self._policy = PoolsPolicy()
        self._random = random.Random(seed)
        self._owed = 0.0  # expected arrivals until the next one
        self._reading: list[float] = []  # remaining prompt tokens of sessions in prefill
        self._decoding: list[float] = []  # remaining answer tokens of decoding sessions

    @property
    def sessions(self) -> int:
        return len(self._reading) + len(self._decoding)

    def run(self, seconds: int, rate: Callable[[int], float]) -> None:
        for _ in range(seconds):
            self.targets.tick(self.now)
            self.drafters.tick(self.now)
            self._arrive(rate(self.now))
            self._serve()
            self._scale()
            self.now += 1

    def _arrive(self, rate: float) -> None:
        """Adds the arrivals of one second, with exponential gaps at the current rate."""
        self._owed += rate
        while self._owed > 0:
            self._reading.append(PROMPT_TOKENS)
            self._owed -= self._random.expovariate(1.0)

    def _serve(self) -> None:
        """Simulates one second of all replicas."""
        costs = self._costs
        targets = max(1, self.targets.running)
        places = targets * self.targets.max_sessions
        running = min(self.sessions, places)
        queued = self.sessions - running
        drafted = min(running, self.drafters.running * self.drafters.max_sessions) if self.speculates else 0
        undrafted = running - drafted if self.speculates else 0
        each = drafted / self.drafters.running if self.drafters.running else 0.0
        step_s = costs.step_s + costs.step_row_s * running / targets
        pass_s = costs.pass_s + costs.pass_row_s * each if each else 0.0
        late = float(pass_s > 2 * step_s)
        round_s = step_s if late else max(step_s, pass_s)
        alone_s = costs.pass_s + costs.pass_row_s
        shared = min(1.0, pass_s / round_s) * max(0.0, 1 - alone_s / pass_s) if each >= 1 else 0.0
        unread = len(self._reading)
        self._read(targets * costs.read_tokens)
        share_drafted = drafted / running if running else 0.0
        rate = (1 + costs.accepted * (1 - late) * share_drafted) / round_s
        self._decode(rate, places)
        wait_s = unread * PROMPT_TOKENS / (targets * costs.read_tokens)
        report = TargetReport(
            running=running / targets,
            queued=queued / targets,
            drafted=drafted / targets,
            undrafted=undrafted / targets,
            waiting=1 - step_s / round_s,
            cache=0.5 * running / places,
            unread=unread / targets,
            first_token_s=wait_s,
            gain=rate * step_s if share_drafted else 1.0,
        )
        self.targets.reports.append(report)
        self.drafters.reports.append(DraftReport(shared, late))

    def _read(self, tokens: float) -> None:
        while self._reading and tokens > 0:
            read = min(tokens, self._reading[0])
            tokens -= read
            self._reading[0] -= read
            if self._reading[0] <= 0:
                self._reading.pop(0)
                self._decoding.append(TOKENS)

    def _decode(self, rate: float, places: int) -> None:
        left = [tokens - rate if at < places else tokens for at, tokens in enumerate(self._decoding)]
        self._decoding = [tokens for tokens in left if tokens > 0]
        self.finished += len(left) - len(self._decoding)

    def _scale(self) -> None:
        pools = {TARGET: self.targets, DRAFTER: self.drafters}
        settings = {TARGET: as_numbers({name: pool.scaling for name, pool in pools.items()}), DRAFTER: {}}
        seen = {name: pool.observed(name, self.now, settings[name]) for name, pool in pools.items()}
        sizes, states = self._policy(seen)
        for name, pool in pools.items():
            pool.resize(sizes[name], self.now, self._start_s)
            pool.state = states[name]
            pool.sizes.append(pool.size)
