"""The simulator agrees with closed formulas, repeats results for equal seeds, and detects broken components."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import stdev

import pytest

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.drafting.session_table import SessionTable
from cluster.errors import ConfigError, TargetLostError
from cluster.routing.ledger import Session
from cluster.verification.block_buffer import BlockBuffer, OrphanBuffer
from cluster.verification.sequence import TargetSequence
from tools.planning.estimates import RoundCosts, expected_tokens, lock_step, speed_up
from tools.simulation.config import (
    Fault,
    Faults,
    Fleet,
    Kind,
    Mode,
    Role,
    SimulationConfig,
    Speculation,
    random_scenario,
)
from tools.simulation.network import Clock, NetworkFaults
from tools.simulation.oracle import STOP, ClosedLoop, DraftQuality, Poisson, Workload, reference_text
from tools.simulation.world import Arrival, Commit, SimulationReport, World, share_met, steady_rate

STEP_S = 0.020
TOKEN_S = 0.002
HOP_S = 0.0005
COSTS = CostModel(
    target=ForwardCost.linear(STEP_S),
    draft=DraftCost(forward=ForwardCost.linear(TOKEN_S)),
    hop_s=HOP_S,
    host_step_s=0.0,
    host_row_s=0.0,
)
ONE_AT_A_TIME = Workload(ClosedLoop(1), sessions=8, prompt_tokens=8, new_tokens=256)
SCENARIOS = 60  # `make random_scenarios` has thousands


def run(
    acceptance: float, draft_tokens: int, mode: Mode, load: Workload = ONE_AT_A_TIME, **changes: object
) -> SimulationReport:
    config = SimulationConfig(COSTS, Speculation(draft_tokens, DraftQuality((acceptance,)), mode), load)
    return World(replace(config, **changes)).run()


# ---------------------------------------------------------------- comparison with formulas


def test_non_speculative_decoding_commits_a_token_per_step():
    report = run(0.8, 0, Mode.NO_LOOKAHEAD)
    assert report.tokens_per_s == pytest.approx(1 / STEP_S, rel=0.02)
    assert (report.blocks, report.drafted) == (0, 0)
    assert report.steps == report.verifies == 8 * 256


def test_non_speculative_steps_have_a_separate_cost():
    costs = COSTS.model_copy(update={"non_speculative": ForwardCost.linear(STEP_S / 2)})
    assert run(0.8, 0, Mode.NO_LOOKAHEAD, costs=costs).tokens_per_s == pytest.approx(2 / STEP_S, rel=0.02)
    assert run(0.8, 5, Mode.LOCK_STEP, costs=costs).tokens_per_s == pytest.approx(
        run(0.8, 5, Mode.LOCK_STEP).tokens_per_s, rel=0.02
    )


def test_a_target_idles_while_a_block_is_drafted_and_sent():
    world = World(SimulationConfig(COSTS, Speculation(5, DraftQuality((0.8,)), Mode.LOCK_STEP), ONE_AT_A_TIME))
    world.run()
    (target,) = world.targets
    assert target.scheduler.counts.step_s == pytest.approx(target.busy_s)
    expected = lock_step(RoundCosts(STEP_S, STEP_S, 5 * TOKEN_S, HOP_S)) / STEP_S
    assert 1 + target.scheduler.counts.idle_s / target.scheduler.counts.step_s == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_lock_step_matches_the_formula(acceptance):
    report = run(acceptance, 5, Mode.LOCK_STEP)
    tokens = expected_tokens(acceptance, 5)
    assert report.tokens_per_block == pytest.approx(tokens, rel=0.05)
    costs = RoundCosts(STEP_S, STEP_S, 5 * TOKEN_S, HOP_S)
    assert report.tokens_per_s * STEP_S == pytest.approx(speed_up(tokens, lock_step(costs), STEP_S), rel=0.05)


def test_right_guesses_hide_drafting_behind_verification():
    """With a perfect draft model, a round takes no longer than its step, including the network."""
    report = run(1.0, 5, Mode.ADAPTIVE)
    assert report.tokens_per_s == pytest.approx(6 / STEP_S, rel=0.05)
    assert report.causes["guess_miss"] < 0.05 * report.causes["guess_hit"]


def test_sessions_share_steps():
    many = run(0.8, 0, Mode.NO_LOOKAHEAD, Workload(ClosedLoop(8), sessions=32, prompt_tokens=8, new_tokens=64))
    assert many.tokens_per_s == pytest.approx(8 / STEP_S, rel=0.05)


def test_sessions_may_come_in_batches():
    """Each batch begins after the previous one ends, so a batch's last sessions have the target to themselves."""
    loop = ClosedLoop(4, batch=6)
    begun = 0
    ended = 0
    at_once = []
    while ended < 15:
        begun += loop.due(begun, ended, 15)
        at_once.append(begun - ended)
        ended += 1
    assert at_once == [4, 4, 4, 3, 2, 1, 4, 4, 4, 3, 2, 1, 3, 2, 1]


def test_batch_ends_cost_throughput():
    """Eight sessions of 128 steps, five at a time, take 256 steps in batches, and 205 in a continuous flow."""
    in_batches, in_a_row = (
        run(0.8, 0, Mode.NO_LOOKAHEAD, Workload(ClosedLoop(5, batch), sessions=80, prompt_tokens=8, new_tokens=128))
        for batch in (8, None)
    )
    assert in_batches.tokens_per_s == pytest.approx(8 * 128 / 256 / STEP_S, rel=0.05)
    assert in_a_row.tokens_per_s == pytest.approx(5 / STEP_S, rel=0.05)


def test_blocks_end_where_acceptance_is_zero():
    speculation = Speculation(5, DraftQuality((1.0, 1.0, 0.0)), Mode.LOCK_STEP)
    report = World(SimulationConfig(COSTS, speculation, ONE_AT_A_TIME)).run()
    assert report.tokens_per_block == pytest.approx(3.0, rel=0.02)


def test_open_arrivals_are_served_at_their_own_rate():
    load = Workload(Poisson(per_s=2.0), sessions=200, prompt_tokens=8, new_tokens=16)
    report = run(0.8, 0, Mode.NO_LOOKAHEAD, load)
    assert report.tokens_per_s == pytest.approx(2.0 * 16, rel=0.2)
    assert report.latency_s == pytest.approx(17 * STEP_S, rel=0.3)


def test_equal_seeds_give_equal_runs():
    first, again, other = (World(replace(random_scenario(5), seed=seed)).run() for seed in (5, 5, 6))
    assert first == again
    assert first != other


# ---------------------------------------------------------------- faults


def test_random_scenarios_commit_the_reference_text():
    """`World.run` asserts that every session ends with the non-speculative text, and that no resources leak."""
    reports = [World(random_scenario(seed)).run() for seed in range(SCENARIOS)]
    assert sum(report.tokens for report in reports) > 10 * SCENARIOS
    for cause in (
        "guess_hit",
        "wrong_guess",
        "stale",
        "duplicate",
        "verdict_gap",
        "late",
        "drafter given up",
        "given_up",
    ):
        assert sum(report.causes[cause] for report in reports) > 0, f"no random_scenario met '{cause}'"
    failed = [report for report in reports if report.failed]
    assert len(failed) < SCENARIOS / 20, "targets fail so seldom that a session is hardly ever given up"


def test_random_scenarios_commit_the_same_text_in_lock_step():
    """The lock-step loop is the specification of the overlapped loop, even under faults."""
    causes = {Mode.LOCK_STEP: Counter[str](), Mode.ADAPTIVE: Counter[str]()}
    compared = 0
    ended = 0
    for seed in range(SCENARIOS // 5):
        config = random_scenario(seed)
        texts = []
        for mode, met in causes.items():
            world = World(replace(config, speculation=replace(config.speculation, mode=mode)))
            met.update(world.run().causes)
            whole = [assignment.session for assignment in world.over if assignment.error is None]
            texts.append({session.generation.session: session.committed for session in whole})
        slow, fast = texts
        both = slow.keys() & fast.keys()  # a lost router or target may end some sessions in only one of them
        compared += len(both)
        ended += len(slow | fast)
        assert {name: slow[name] for name in both} == {name: fast[name] for name in both}
    assert compared > 0.9 * ended
    assert causes[Mode.LOCK_STEP]["guesses"] == 0, "lock step drafts nothing ahead"
    assert causes[Mode.ADAPTIVE]["guess_hit"] > SCENARIOS // 5, "what was drafted ahead hardly mattered"


LOAD = Workload(ClosedLoop(4), sessions=8, prompt_tokens=20, new_tokens=40, stopping=0.3)
TWO_OF_EACH = Fleet(targets=2, drafters=2, routers=2)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("role", [Role.DRAFTER, Role.TARGET])
def test_each_fault_alone(role, kind):
    fault = Fault(0.3, role, 0, kind, seconds=7.0)
    fault_plan = Faults(NetworkFaults(lost=0.1, duplicated=0.1, max_delay_s=0.03), (fault,))
    report = run(0.8, 4, Mode.ADAPTIVE, LOAD, fleet=TWO_OF_EACH, fault_plan=fault_plan)
    assert (report.sessions, report.failed) == (8, 0)


def test_losing_every_drafter_costs_only_speed():
    deaths = tuple(Fault(0.1 + 0.1 * n, Role.DRAFTER, 0, Kind.DIES, seconds=1e3) for n in range(2))
    report = run(0.8, 4, Mode.ADAPTIVE, LOAD, fleet=TWO_OF_EACH, fault_plan=Faults(faults=deaths))
    unhurt = run(0.8, 4, Mode.ADAPTIVE, LOAD, fleet=TWO_OF_EACH)
    assert report.sessions == 8
    assert report.blocks < unhurt.blocks / 2
    assert report.longest_gap_s < 6 * STEP_S


LONG = Workload(ClosedLoop(8), sessions=16, prompt_tokens=20, new_tokens=600)
MANY_ON_ONE = Workload(ClosedLoop(64), sessions=128, prompt_tokens=20, new_tokens=200)


def test_the_sessions_of_a_stalled_drafter_move_to_another():
    """The drafter still receives messages, so no stream breaks, but it sends no blocks."""
    stall = Faults(faults=(Fault(1.0, Role.DRAFTER, 0, Kind.STALLS, seconds=20.0),))
    fleet = Fleet(drafters=2)
    report, unhurt = (run(0.8, 4, Mode.ADAPTIVE, LONG, fleet=fleet, fault_plan=a) for a in (stall, Faults()))
    assert report.causes["drafter given up"] >= 1
    assert report.causes["given_up"] == 0, "it is not overloaded"
    assert report.tokens_per_s > 0.9 * unhurt.tokens_per_s
    assert report.longest_gap_s < unhurt.longest_gap_s + 3 * STEP_S


def test_a_lone_drafter_is_used_again_after_a_stall():
    stall = Faults(faults=(Fault(1.0, Role.DRAFTER, 0, Kind.STALLS, seconds=3.0),))
    report = run(0.8, 4, Mode.ADAPTIVE, LONG, fault_plan=stall)
    unhurt = run(0.8, 4, Mode.ADAPTIVE, LONG)
    assert report.causes["drafter given up"] >= 1
    assert report.blocks > 0.8 * unhurt.blocks


@pytest.mark.parametrize("drafters", [1, 2])
def test_an_overloaded_drafter_costs_little(drafters):
    draft = DraftCost(forward=ForwardCost.linear(0.002, per_row_s=0.002))  # a pass for all sessions takes many steps
    costs = CostModel(
        target=ForwardCost.linear(STEP_S, per_token_s=0.0002), draft=draft, hop_s=HOP_S, host_step_s=0.0, host_row_s=0.0
    )
    speculation = Speculation(4, DraftQuality((0.8,)))
    config = SimulationConfig(costs, speculation, MANY_ON_ONE, Fleet(drafters=drafters))
    report = World(config).run()
    plain = World(replace(config, fleet=Fleet(drafters=0))).run()
    assert report.tokens_per_s > 0.97 * plain.tokens_per_s


def noise(*struck: int, at_s: float = 1.0, seconds: float = 1e3) -> Faults:
    """Returns a fault that turns drafts to noise at a time when each session has about 200 tokens of good drafts."""
    return Faults(faults=tuple(Fault(at_s, Role.DRAFTER, index, Kind.DRAFTS_NOISE, seconds) for index in struck))


EIGHT = Workload(ClosedLoop(8), sessions=32, prompt_tokens=20, new_tokens=600)


@pytest.mark.parametrize("mode", [Mode.LOCK_STEP, Mode.ADAPTIVE])
def test_a_drafter_that_turns_to_noise_is_resynced_and_excluded(mode):
    """No session fails, all texts equal the non-speculative ones, and the other drafter takes over all sessions."""
    report = run(0.8, 4, mode, EIGHT, fleet=Fleet(drafters=2), fault_plan=noise(0))
    unhurt = run(0.8, 4, mode, EIGHT, fleet=Fleet(drafters=2))
    assert (report.sessions, report.failed) == (32, 0)
    assert report.causes["drafter resynced"] >= 1
    assert report.causes["drafter given up"] >= 1
    assert report.causes["resync"] >= 1, "the drafter has heard of it"
    assert report.tokens_per_s > 0.9 * unhurt.tokens_per_s
    assert not [cause for cause in unhurt.causes if cause.startswith("drafter")], "without noise there is no alarm"


@pytest.mark.parametrize("drafters", [1, 2])
def test_sessions_continue_at_full_speed_if_all_drafters_turn_to_noise(drafters):
    report = run(0.8, 4, Mode.ADAPTIVE, EIGHT, fleet=Fleet(drafters=drafters), fault_plan=noise(*range(drafters)))
    plain = run(0.8, 0, Mode.ADAPTIVE, EIGHT)
    assert (report.sessions, report.failed) == (32, 0)
    assert report.tokens_per_s > 0.95 * plain.tokens_per_s


def test_a_recovered_drafter_is_used_again():
    short = Workload(ClosedLoop(4), sessions=96, prompt_tokens=20, new_tokens=200)
    ill = run(0.8, 4, Mode.ADAPTIVE, short, fault_plan=noise(0))
    better = run(0.8, 4, Mode.ADAPTIVE, short, fault_plan=noise(0, seconds=5.0))
    assert better.failed == 0
    assert better.tokens_per_s > 1.3 * ill.tokens_per_s


def test_a_dead_routers_sessions_are_freed():
    death = Faults(faults=(Fault(0.3, Role.ROUTER, 0, Kind.DIES),))
    report = run(0.8, 4, Mode.ADAPTIVE, LOAD, fleet=TWO_OF_EACH, fault_plan=death)
    assert report.abandoned == 2
    assert report.sessions == 6


def test_without_targets_sessions_end_with_an_error():
    deaths = tuple(Fault(0.1, Role.TARGET, 0, Kind.DIES, seconds=1e6) for _ in range(2))
    world = World(
        SimulationConfig(
            COSTS,
            Speculation(4, DraftQuality((0.8,))),
            LOAD,
            replace(TWO_OF_EACH, target_wait_s=3.0),
            Faults(faults=deaths),
        )
    )
    report = world.run()
    assert report.failed == 8
    assert all(isinstance(assignment.error, TargetLostError) for assignment in world.over)


# ---------------------------------------------------------------- detection of broken components


def found_by_random_scenarios() -> bool:
    for seed in range(SCENARIOS):
        try:
            World(random_scenario(seed)).run()
        except (AssertionError, KeyError, IndexError):
            return True
    return False


def test_a_duplicated_verdict_is_detected(monkeypatch):
    right = Session.on_verdict

    def wrong(self, source, verdict):
        here = replace(verdict, base_len=len(self._prefix), prefix_hash=self._prefix.hash)
        return right(self, source, here)

    monkeypatch.setattr(Session, "on_verdict", wrong)
    assert found_by_random_scenarios()


def test_leaked_orphan_blocks_are_detected(monkeypatch):
    monkeypatch.setattr(OrphanBuffer, "expire", lambda self, now: None)
    monkeypatch.setattr(OrphanBuffer, "drafter_gone", lambda self, drafter: None)
    assert found_by_random_scenarios()


def test_miscounted_draft_tokens_are_detected(monkeypatch):
    monkeypatch.setattr(BlockBuffer, "leave", lambda self: None)
    assert found_by_random_scenarios()


def test_leaked_draft_sequences_are_detected(monkeypatch):
    monkeypatch.setattr(SessionTable, "_close", lambda self, router, close: [])
    assert found_by_random_scenarios()


def test_a_wrong_cache_is_detected(monkeypatch):
    right = TargetSequence.next_tokens

    def without_the_first(self, budget):
        tokens, draft, decides = right(self, budget)
        return tokens[1:] or tokens, draft, decides

    monkeypatch.setattr(TargetSequence, "next_tokens", without_the_first)
    assert found_by_random_scenarios()


# ---------------------------------------------------------------- parts


def test_simultaneous_events_keep_their_order():
    clock = Clock()
    seen = []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: clock.after(0.0, lambda: seen.append("after the second")))
    clock.at(1.0, lambda: seen.append("second"))
    assert clock.run() == 4
    assert (seen, clock.now) == (["second", "after the second", "late"], 2.0)


def test_a_stopped_clock_is_detected():
    clock = Clock()

    def again() -> None:
        clock.after(0.0, again)

    again()
    with pytest.raises(AssertionError, match="time stands still"):
        clock.run()


def test_a_script_has_the_requested_acceptance():
    load = Workload(ClosedLoop(1), 1, prompt_tokens=0, new_tokens=4000)
    text = reference_text(load, seed=1, index=0)
    chances = DraftQuality((0.7,), runner_up=0.5).chances(3)
    assert chances == pytest.approx((0.7, 0.15))
    first, second = zip(*[text.choices(at, *chances) for at in range(4000)], strict=True)
    right = [a == b for a, b in zip(first, text.tokens, strict=True)]
    assert sum(right) / 4000 == pytest.approx(0.7, abs=0.03)
    assert all(one != other for one, other in zip(second, first, strict=True))
    assert sum(a == b for a, b in zip(second, text.tokens, strict=True)) / 4000 == pytest.approx(0.15, abs=0.03)
    assert text.agreed(0, first) == right.index(False)


def test_a_script_may_stop_before_its_limit():
    load = Workload(ClosedLoop(1), 1, prompt_tokens=3, new_tokens=20, stopping=1.0)
    text = reference_text(load, seed=2, index=0)
    assert text.plain[-1] == STOP
    assert STOP not in text.plain[:-1]
    assert text.tokens[: 3 + len(text.plain)] == text.prompt + text.plain


def test_forward_costs_are_interpolated_and_extrapolated():
    cost = ForwardCost(by_tokens=((1, 10.0), (8, 17.0), (40, 33.0)), per_row_s=1.0)
    assert [cost.seconds(1, tokens) for tokens in (0, 1, 4.5, 8, 24, 40, 56)] == [11, 11, 14.5, 18, 26, 34, 42]
    assert ForwardCost(by_tokens=((4, 2.0),)).seconds(3, 100) == 2.0
    assert ForwardCost.linear(1.0, per_row_s=0.5, per_token_s=0.25).seconds(2, 8) == pytest.approx(4.0)


@pytest.mark.parametrize("plain", [None, ForwardCost.linear(STEP_S / 2)])
def test_costs_are_saved_and_loaded(tmp_path: Path, plain: ForwardCost | None):
    costs = COSTS.model_copy(update={"non_speculative": plain})
    costs.save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"target": {"by_tokens": [[2, 1], [1, 2]]}}', "in increasing order"),
        ('{"target": {"by_tokens": []}}', "target.by_tokens"),
        ('{"hop": 1}', "hop: unknown key; did you mean hop_s"),
        ("{", "Invalid JSON"),
    ],
)
def test_invalid_costs_are_named(tmp_path: Path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        CostModel.load(path)


def test_missing_costs_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read costs"):
        CostModel.load(tmp_path / "none.json")


def test_the_steady_rate_excludes_start_and_end():
    slow_start = [Commit(float(at), 1) for at in range(0, 50, 10)]
    steady = [Commit(50 + at / 2, 1) for at in range(1, 31)]
    slow_end = [Commit(70.0 + at * 10, 1) for at in range(5)]
    assert steady_rate([*slow_start, *steady, *slow_end]) == pytest.approx(2.0)
    assert steady_rate([]) == 0.0


def test_a_rate_is_met_if_all_requested_tokens_are_committed():
    """The load is one 10-token request per second, measured after the first quarter."""
    arrivals = [Arrival(float(at), 10) for at in range(40)]
    late = [Commit(at + 0.1 * part + 3.0, 1) for at in range(40) for part in range(10)]
    assert share_met(arrivals, late) == pytest.approx(1.0), "however late, if not later and later"
    half = [Commit(at + 0.2 * part, 1) for at in range(40) for part in range(5)]
    assert share_met(arrivals, half) == pytest.approx(0.5, abs=0.02)
    assert share_met([], []) == 1.0


def test_arrivals_have_the_requested_rate():
    times = Poisson(2.0).times(400, random.Random(0))
    assert times == sorted(times)
    assert 190 < times[-1] < 200, "whatever luck has it"
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert stdev(gaps) == pytest.approx(0.5, rel=0.2), "exponential: as far from the mean as it is long"


def test_a_rate_beyond_capacity_is_not_met():
    costs = CostModel(target=ForwardCost.linear(0.010, per_token_s=0.010), draft=COSTS.draft)  # below 100 tokens/s
    met = []
    for per_s in (4, 16):
        load = Workload(Poisson(float(per_s)), sessions=128, prompt_tokens=1, new_tokens=12)
        fleet = Fleet(1, 0, sessions_per_target=load.sessions)
        met.append(World(SimulationConfig(costs, Speculation(0, DraftQuality((0.5,))), load, fleet)).run().met)
    assert met[0] > 0.9
    assert met[1] < 0.7


def test_a_drafting_pass_costs_its_forwards_and_further_tokens():
    forward = ForwardCost.linear(10, per_row_s=1)
    further = ForwardCost.linear(2)
    cost = DraftCost(forward=forward, further=further, per_pass_s=5, tokens_per_forward=3)
    assert [cost.seconds(1, tokens) for tokens in (0, 1, 2, 3)] == [5, 5 + 11, 5 + 13, 5 + 15]
    assert cost.seconds(4, 6) == 5 + 2 * (14 + 2 * 2)
    assert cost.times(2).seconds(4, 6) == 2 * cost.seconds(4, 6)


# ---------------------------------------------------------------- planned moves


def test_departures_fail_no_session():
    """The departures exceed a session's limit of lost targets; every text equals the non-speculative one."""
    leaving = [
        Fault(0.5 * (1 + at), role, at, Kind.LEAVES, seconds=2.0)
        for at in range(8)
        for role in (Role.TARGET, Role.DRAFTER)
    ]
    load = Workload(ClosedLoop(6), sessions=12, prompt_tokens=8, new_tokens=300)
    plan = Faults(faults=tuple(leaving))
    report = run(0.8, 4, Mode.ADAPTIVE, load, fleet=Fleet(targets=2, drafters=2), fault_plan=plan)
    assert (report.sessions, report.failed) == (12, 0)
