"""Invariants that must hold when a simulated run is over, whatever went wrong in it.

Every session ended with the text of non-speculative decoding, no process holds anything, and the outcome of each draft
token is counted. A violation raises AssertionError: it is a bug in the schedulers or in the simulation.
"""

from collections.abc import Mapping, Sequence

from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.reference_loop import lock_step
from cluster.routing.ledger import Generation, Session
from cluster.speculation.policy import LockStep
from cluster.verification.limits import VerificationLimits
from cluster.verification.scheduler import VerificationScheduler
from tools.simulation.oracle import VOCABULARY, DraftQuality, OracleMethod, Script
from tools.simulation.simulated_drafter import SimulatedDrafter
from tools.simulation.simulated_router import SimulatedAssignment
from tools.simulation.simulated_target import OracleEngine, SimulatedTarget

LONG_AFTER_S = 3600.0  # all waits have expired by this time


def check_texts(assignments: Sequence[SimulatedAssignment], scripts: Mapping[str, Script]) -> None:
    """Checks that failed sessions committed a prefix of their reference text, and all others the whole."""
    for assignment in assignments:
        name = assignment.session.generation.session
        committed = assignment.session.committed
        plain = scripts[name].plain
        expected = plain if assignment.error is None else plain[: len(committed)]
        assert committed == expected, f"the text of {name} differs from plain decoding"


def check_specification(generation: Generation, script: Script, draft: DraftQuality) -> None:
    """Checks the reference text itself: lock step must commit the same for such a session."""
    scripts = {generation.session: script}
    limits = VerificationLimits(VOCABULARY, script.max_len, max_sessions=1, max_step_tokens=script.max_len)
    rounds = lock_step(
        Session(generation),
        DraftScheduler(DrafterLimits(VOCABULARY, script.max_len, max_sessions=1), draft_ahead=False),
        OracleMethod(scripts, draft),
        VerificationScheduler(limits, LockStep()),
        OracleEngine(scripts, limits.page_size),
    )
    committed = tuple([token for emit in rounds for token in emit.tokens])
    assert committed == script.plain, f"lock step commits another text of {generation.session} than plain decoding"


def check_target(target: SimulatedTarget) -> None:
    """Checks that no work is left, and neither scheduler nor cache holds anything."""
    name = target.process.address
    now = target.process.clock.now
    last = target.scheduler.plan(now + LONG_AFTER_S)
    if last is not None:
        assert not last.rows, f"{name} has work left"
        target.scheduler.apply(target.engine.step(last), 0.0, now)
    assert target.scheduler.is_idle, f"the scheduler of {name} still holds something"
    assert target.engine.is_empty, f"the cache of {name} still holds something"
    settled = target.scheduler.accepted_tokens + target.scheduler.wasted_tokens
    assert settled == target.received_tokens, f"{name} has not said of each draft token what became of it"


def check_drafter(drafter: SimulatedDrafter) -> None:
    drafter.scheduler.next_pass(0, 0)
    assert drafter.scheduler.is_idle, f"the scheduler of {drafter.process.address} still holds a session"
