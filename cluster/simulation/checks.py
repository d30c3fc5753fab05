"""What must hold when a simulated run is over, whatever went wrong in it.

Every session ended, with the text of plain decoding; nobody holds anything; what came of each draft token is counted.
A violation is an AssertionError: it is a bug of the books, or of the simulation.
"""

from collections.abc import Mapping, Sequence

from cluster.simulation.drafter import SimulatedDrafter
from cluster.simulation.oracle import Script
from cluster.simulation.router import SimulatedFlight
from cluster.simulation.target import SimulatedTarget

LONG_AFTER_S = 3600.0  # when everything that waited for something has expired


def check_texts(flights: Sequence[SimulatedFlight], scripts: Mapping[str, Script]) -> None:
    """A session that failed committed the beginning of its plain text, all others the whole."""
    for flight in flights:
        name, committed = flight.session.generation.session, flight.session.committed
        plain = scripts[name].plain
        expected = plain if flight.error is None else plain[: len(committed)]
        assert committed == expected, f"the text of {name} differs from plain decoding"


def check_target(target: SimulatedTarget) -> None:
    """Nothing is left to do, and neither book nor cache holds anything."""
    name, now = target.process.address, target.process.clock.now
    last = target.verifier.plan(now + LONG_AFTER_S)
    if last is not None:
        assert not last.rows, f"{name} has work left"
        target.verifier.apply(target.engine.step(last), 0.0, now)
    assert target.verifier.is_idle, f"the book of {name} still holds something"
    assert target.engine.is_empty, f"the cache of {name} still holds something"
    settled = target.verifier.accepted_tokens + target.verifier.wasted_tokens
    assert settled == target.received_tokens, f"{name} has not said of each draft token what became of it"


def check_drafter(drafter: SimulatedDrafter) -> None:
    drafter.book.take_closed()
    assert drafter.book.is_idle, f"the book of {drafter.process.address} still holds a session"
