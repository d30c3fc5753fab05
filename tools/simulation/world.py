"""Runs one simulation: builds the system, runs the workload with its faults, checks the final state, reports speeds.

At the end of a run, every session must have the text of non-speculative decoding, all processes must be idle, and all
draft tokens must be accounted for. A violation raises AssertionError and reveals a bug in the schedulers or in the
simulator.
"""

import gc
import logging
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.reference_loop import lock_step
from cluster.routing.ledger import Generation, Session
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from protos.frozen import value
from protos.messages import Acceptance, Sampling
from tools.simulation.actors import (
    OracleEngine,
    SimulatedAssignment,
    SimulatedDrafter,
    SimulatedRouter,
    SimulatedTarget,
)
from tools.simulation.config import Fault, Kind, Mode, Role, SimulationConfig
from tools.simulation.network import Clock, Network, Process, SimulatedLink
from tools.simulation.oracle import (
    STOP,
    VOCABULARY,
    ClosedLoop,
    DraftQuality,
    OracleMethod,
    ReferenceText,
    reference_text,
)


@value
class Commit:
    at_s: float
    tokens: int


@value
class Arrival:
    at_s: float
    tokens: int  # committed tokens of the session


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Results of one run; all times are virtual, in seconds."""

    sessions: int  # sessions that ended normally
    failed: int  # sessions that failed without an available target
    abandoned: int  # sessions lost with their router
    tokens: int  # committed tokens
    tokens_per_s: float  # rate over the middle half of all tokens after the warm-up
    met: float  # committed share of tokens requested during arrivals
    latency_s: float  # median duration of sessions that arrive after the warm-up
    first_token_s: float  # their median time to the first token
    longest_gap_s: float  # longest time between two commits of a session
    verifies: int  # committed verdicts
    blocks: int  # committed verdicts over a block
    drafted: int
    accepted: int
    steps: int  # steps of all targets
    target_busy: float  # mean share of computing time of targets (next: of drafters)
    drafter_busy: float
    causes: Counter[str]  # dropped blocks by cause, and other counts by name
    events: int  # number of simulated events

    @property
    def tokens_per_block(self) -> float | None:
        """Returns the mean number of tokens committed per verified block."""
        return 1 + self.accepted / self.blocks if self.blocks else None


def after_warm_up(commits: Sequence[Commit], tokens: int) -> Sequence[Commit]:
    """Returns the commits after the first `tokens` tokens."""
    passed = accumulate(commit.tokens for commit in commits)
    return commits[sum(1 for count in passed if count <= tokens) :]


def steady_rate(commits: Sequence[Commit]) -> float:
    """Returns the tokens per second over the middle half of all tokens."""
    total = sum(commit.tokens for commit in commits)
    passed = 0
    first = last = None
    for commit in commits:
        passed += commit.tokens
        if first is None and passed >= total / 4:
            first = (commit.at_s, passed)
        if last is None and passed >= 3 * total / 4:
            last = (commit.at_s, passed)
    if first is None or last is None or last[0] == first[0]:
        return 0.0
    return (last[1] - first[1]) / (last[0] - first[0])


def share_met(arrivals: Sequence[Arrival], commits: Sequence[Commit]) -> float:
    """Returns the committed share of the demand from the first quarter of arrivals to the last arrival.

    The share is about 1 in a steady state and lower if the queue keeps growing.
    """
    times = sorted(arrival.at_s for arrival in arrivals)
    if not times:
        return 1.0
    begins = times[len(times) // 4]
    ends = times[-1]
    asked = sum(arrival.tokens for arrival in arrivals if begins < arrival.at_s <= ends)
    done = sum(commit.tokens for commit in commits if begins < commit.at_s <= ends)
    return done / asked if asked else 1.0


def median(values: Iterable[float | None]) -> float:
    """Returns the median of the known values; 0 if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def sums(assignments: Sequence[SimulatedAssignment]) -> dict[str, int]:
    """Sums the verification counters."""
    counts = [assignment.session.counts for assignment in assignments]
    return {name: sum(getattr(c, name) for c in counts) for name in ("verifies", "blocks", "drafted", "accepted")}


LONG_AFTER_S = 3600.0  # seconds after which all waits have expired


def check_texts(assignments: Sequence[SimulatedAssignment], reference_texts: Mapping[str, ReferenceText]) -> None:
    """Checks that failed sessions committed a prefix of their reference text, and all others the whole text."""
    for assignment in assignments:
        name = assignment.session.generation.session
        committed = assignment.session.committed
        plain = reference_texts[name].plain
        expected = plain if assignment.error is None else plain[: len(committed)]
        assert committed == expected, f"the text of {name} differs from non-speculative decoding"


def check_specification(generation: Generation, reference_text: ReferenceText, draft: DraftQuality) -> None:
    """Checks the reference text itself: lock step must commit the same text."""
    reference_texts = {generation.session: reference_text}
    limits = VerificationLimits(
        VOCABULARY, reference_text.max_len, max_sessions=1, max_step_tokens=reference_text.max_len
    )
    rounds = lock_step(
        Session(generation),
        DraftScheduler(DrafterLimits(VOCABULARY, reference_text.max_len, max_sessions=1), draft_ahead=False),
        OracleMethod(reference_texts, draft),
        VerificationScheduler(limits, LockStep()),
        OracleEngine(reference_texts, limits.page_size),
    )
    committed = tuple([token for emit in rounds for token in emit.tokens])
    assert committed == reference_text.plain, (
        f"lock step commits a text of {generation.session} that differs from non-speculative decoding"
    )


def check_target(target: SimulatedTarget) -> None:
    """Checks that the target has no work left, and that its scheduler and cache are empty."""
    name = target.process.address
    now = target.process.clock.now
    last = target.scheduler.plan(now + LONG_AFTER_S)
    if last is not None:
        assert not last.rows, f"{name} has work left"
        target.scheduler.apply(target.engine.step(last), 0.0, now)
    assert target.scheduler.is_idle, f"the scheduler of {name} still holds something"
    target.scheduler.admission.pages.check()
    assert target.engine.is_empty, f"the cache of {name} still holds something"
    settled = target.scheduler.counts.accepted_tokens + target.scheduler.counts.wasted_tokens
    assert settled == target.received_tokens, f"{name} has not accounted for all draft tokens"


def check_drafter(drafter: SimulatedDrafter) -> None:
    drafter.scheduler.next_pass(0, 0)
    assert drafter.scheduler.is_idle, f"the scheduler of {drafter.process.address} still holds a session"


TOKEN_KEY = b"no secret here"
Simulated = SimulatedRouter | SimulatedDrafter | SimulatedTarget


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disables the cyclic garbage collector, which would scan the whole world repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _without_logging() -> Iterator[None]:
    """Silences warnings of the schedulers, since the simulation causes losses on purpose."""
    log = logging.getLogger("cluster")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class World:
    """Runs one simulation; use a new instance for each run."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.clock = Clock()
        self._rng = random.Random(f"world {config.seed}")
        self._arrivals_rng = random.Random(f"arrivals {config.seed}")  # independent of the fleet
        self._network = Network(self.clock, config.costs.hop_s, config.fault_plan.network_faults, self._rng)
        self.reference_texts: dict[str, ReferenceText] = {}  # by session name
        self.over: list[SimulatedAssignment] = []
        self.abandoned: list[SimulatedAssignment] = []  # sessions lost with their router
        self._commits: list[Commit] = []
        self._process_count: Counter[str] = Counter()
        self._started = 0
        self.targets: list[SimulatedTarget] = []
        self.drafters: list[SimulatedDrafter] = []
        self.routers: list[SimulatedRouter] = []
        self._endpoints: dict[str, SimulatedTarget] = {}  # all targets, including past ones, by address
        fleet = config.fleet
        for role, size in ((Role.TARGET, fleet.targets), (Role.DRAFTER, fleet.drafters), (Role.ROUTER, fleet.routers)):
            for _ in range(size):
                self._add(role)

    def run(self) -> SimulationReport:
        """Runs until no event is due. Raises AssertionError if an invariant is violated."""
        for fault in self.config.fault_plan.faults:
            self.clock.at(fault.at_s, partial(self._inject, fault))
        self.clock.after(4 * self.config.costs.hop_s, self._begin_load)  # after the streams are up
        with _without_gc(), _without_logging():
            self.clock.run()
        self._check()
        return self._report()

    # ------------------------------------------------------------ processes

    def _process(self, role: Role) -> Process:
        self._process_count[role.value] += 1
        return Process(f"{role.value}-{self._process_count[role.value]}", self.clock)

    def _add(self, role: Role) -> None:
        """Adds a process of this role and connects it to its peers."""
        if role is Role.TARGET:
            self._add_target()
        elif role is Role.DRAFTER:
            self._add_drafter()
        else:
            self._add_router()

    def _add_target(self) -> None:
        fleet = self.config.fleet
        limits = VerificationLimits(
            vocabulary=VOCABULARY,
            max_context=self._max_len,
            max_sessions=fleet.sessions_per_target,
            max_step_tokens=fleet.step_tokens,
            pages=fleet.pages_per_target,
            page_size=fleet.page_size,
        )
        engine = OracleEngine(self.reference_texts, limits.page_size)
        scheduler = VerificationScheduler(limits, self.config.speculation.pacing, self.config.costs.target)
        made = SimulatedTarget(self._process(Role.TARGET), scheduler, engine, self.config.costs)
        self.targets.append(made)
        self._endpoints[made.process.address] = made
        for router in self.routers:
            router.connect_target(self._network, made.endpoint)

    def _add_drafter(self) -> None:
        config = self.config
        limits = DrafterLimits(VOCABULARY, self._max_len, config.fleet.sessions_per_drafter)
        cost = config.costs.draft
        method = OracleMethod(self.reference_texts, config.speculation.draft, cost.tokens_per_forward)
        made = SimulatedDrafter(
            self._process(Role.DRAFTER),
            DraftScheduler(limits, config.speculation.mode is Mode.ADAPTIVE, method.shapes),
            method,
            cost,
            limits.max_sessions,
            self._dial_target,
        )
        self.drafters.append(made)
        for router in self.routers:
            router.connect_drafter(self._network, made.endpoint)

    def _add_router(self) -> None:
        made = SimulatedRouter(
            self._process(Role.ROUTER), self.config.fleet.target_wait_s, self._record_commit, self._record_end
        )
        self.routers.append(made)
        for target in self.targets:
            made.connect_target(self._network, target.endpoint)
        for drafter in self.drafters:
            made.connect_drafter(self._network, drafter.endpoint)

    def _dial_target(self, drafter: SimulatedDrafter, address: str) -> SimulatedLink:
        return SimulatedLink(
            self._network,
            drafter.process,
            self._endpoints[address].endpoint,
            live=list,
            on_up=partial(drafter.target_up, address),
            on_frame=partial(drafter.receive, address),
            on_down=partial(drafter.target_down, address),
            ordered=False,
        )

    # ------------------------------------------------------------ load

    @property
    def _max_len(self) -> int:
        return self.config.load.prompt_tokens + self.config.load.new_tokens

    def _begin_load(self) -> None:
        load = self.config.load
        if isinstance(load.arrivals, ClosedLoop):
            self._begin_due(load.arrivals)
            return
        for after_s in load.arrivals.times(load.sessions, self._arrivals_rng):
            self.clock.after(after_s, self._begin_arrival)

    @property
    def _is_full(self) -> bool:
        """Returns whether the run has reached `max_events`; no further session begins then."""
        return self.config.max_events is not None and self.clock.events >= self.config.max_events

    def _begin_arrival(self) -> None:
        if not self._is_full:
            self._begin_session()

    def _begin_session(self) -> None:
        index = self._started
        self._started = self._started + 1
        name = f"s{index}"
        self.reference_texts[name] = reference_text(self.config.load, self.config.seed, index)
        self.routers[index % len(self.routers)].generate(Session(self._generation(name), TOKEN_KEY))

    def _generation(self, name: str) -> Generation:
        text = self.reference_texts[name]
        return Generation(
            session=name,
            prompt=text.prompt,
            max_len=text.max_len,
            stop_ids=(STOP,),
            sampling=Sampling(temperature=0.0),
            seed=self._rng.getrandbits(64),
            draft_seed=self._rng.getrandbits(64),
            choice=0,
            hash_key=self._rng.getrandbits(64),
            acceptance=Acceptance.COUPLED,
            draft_tokens=self.config.speculation.draft_tokens,
        )

    def _record_commit(self, tokens: int) -> None:
        self._commits.append(Commit(self.clock.now, tokens))

    def _record_end(self, assignment: SimulatedAssignment) -> None:
        self.over.append(assignment)
        self._follow_up()

    def _follow_up(self) -> None:
        """Begins sessions that were waiting for others to end."""
        if isinstance(self.config.load.arrivals, ClosedLoop):
            self._begin_due(self.config.load.arrivals)

    def _begin_due(self, loop: ClosedLoop) -> None:
        if self._is_full:
            return
        ended = len(self.over) + len(self.abandoned)
        for _ in range(loop.due(self._started, ended, self.config.load.sessions)):
            self._begin_session()

    # ------------------------------------------------------------ faults

    def _inject(self, fault: Fault) -> None:
        made: dict[Role, Sequence[Simulated]]
        made = {Role.ROUTER: self.routers, Role.DRAFTER: self.drafters, Role.TARGET: self.targets}
        alive = [one for one in made[fault.role] if one.process.alive]
        if not alive:
            return
        victim = alive[fault.index % len(alive)]
        if fault.kind is Kind.HANGS:
            victim.process.hang(fault.seconds)
        elif fault.kind is Kind.STALLS:
            victim.process.stall(fault.seconds)
        elif fault.kind is Kind.SLOWS_DOWN:
            victim.process.slow_down(fault.seconds)
        elif fault.kind is Kind.IS_CUT_OFF:
            for link in list(victim.process.links):
                link.cut()
        elif fault.kind is Kind.LEAVES:
            if not isinstance(victim, SimulatedRouter):
                victim.leave(fault.seconds, partial(self._add, fault.role))
        elif fault.kind is Kind.DRAFTS_NOISE:
            if isinstance(victim, SimulatedDrafter):
                victim.draft_noise(fault.seconds)
        else:
            self._kill(victim, fault)

    def _kill(self, victim: Simulated, fault: Fault) -> None:
        victim.process.die()
        if isinstance(victim, SimulatedRouter):
            self._replace_router(victim)
        else:
            self.clock.after(fault.seconds, partial(self._add, fault.role))

    def _replace_router(self, lost: SimulatedRouter) -> None:
        """Replaces a dead router; abandons its sessions, and directs new clients to the next router."""
        self.routers.remove(lost)
        self._add_router()
        self.abandoned += lost.assignments
        self._follow_up()

    # ------------------------------------------------------------ final checks and report

    def _check(self) -> None:
        expected = self._started if self._is_full else self.config.load.sessions
        missing = expected - len(self.over) - len(self.abandoned)
        assert missing == 0, f"{missing} sessions never ended"
        check_texts(self.over, self.reference_texts)
        for assignment in self.over[:1]:  # only one, since lock step takes as long as the simulation
            generation = assignment.session.generation
            check_specification(generation, self.reference_texts[generation.session], self.config.speculation.draft)
        for target in self.targets:
            if target.process.alive:
                check_target(target)
        for drafter in self.drafters:
            if drafter.process.alive:
                check_drafter(drafter)

    @property
    def _warm_up_tokens(self) -> int:
        """Returns the configured warm-up; if few sessions began, at most half of all tokens."""
        tokens = sum(commit.tokens for commit in self._commits)
        is_cut = self._started < self.config.load.sessions
        return min(self.config.warm_up_tokens, tokens // 2) if is_cut else self.config.warm_up_tokens

    def _report(self) -> SimulationReport:
        assignments = [assignment for assignment in self.over if assignment.error is None]
        arrivals = [Arrival(assignment.arrived_s, len(assignment.session.committed)) for assignment in self.over]
        warm_up_tokens = self._warm_up_tokens
        commits = after_warm_up(self._commits, warm_up_tokens)
        settled_s = commits[0].at_s if commits and warm_up_tokens else 0.0
        # Under overload, all sessions arrive before the warm-up ends.
        late = [assignment for assignment in assignments if assignment.arrived_s >= settled_s] or assignments
        span = max((assignment.ended_s or 0.0 for assignment in self.over), default=0.0) or 1.0
        causes = sum((target.scheduler.counts.dropped for target in self.targets), Counter[str]())
        causes += sum((router.recoveries for router in self.routers), Counter[str]())
        return SimulationReport(
            sessions=len(assignments),
            failed=len(self.over) - len(assignments),
            abandoned=len(self.abandoned),
            tokens=sum(commit.tokens for commit in self._commits),
            tokens_per_s=steady_rate(commits),
            met=share_met(arrivals, self._commits),
            latency_s=median(assignment.latency_s for assignment in late),
            first_token_s=median(assignment.waited_s for assignment in late),
            longest_gap_s=max((assignment.longest_gap_s for assignment in assignments), default=0.0),
            **sums(self.over),
            steps=sum(target.steps for target in self.targets),
            target_busy=sum(target.busy_s for target in self.targets) / len(self.targets) / span,
            drafter_busy=sum(drafter.busy_s for drafter in self.drafters) / max(1, len(self.drafters)) / span,
            causes=sum((drafter.scheduler.counts for drafter in self.drafters), causes),
            events=self.clock.events,
        )
