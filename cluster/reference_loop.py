"""Reference loop: drafts, verifies and commits one session in lock step. Every other schedule must produce the same
tokens.

The loop runs the production schedulers with a single request and in-order message delivery, without loss or delay. The
lossless tests and the simulator compare their committed tokens with this loop's.
"""

from collections.abc import Iterable, Iterator

from cluster.drafting.method import DraftingMethod, apply_updates, make_pass
from cluster.drafting.scheduler import DraftScheduler
from cluster.envelope import Scheduler, Send
from cluster.routing.ledger import Command, CommittedTokens, Phase, Session, ToDrafter, ToTarget
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import StepEngine

ROUTER = "router#1"
DRAFTER = "drafter#1"
TARGET = "target:1"
STEP_S = 0.01  # duration of every step, in seconds


def lock_step(
    session: Session, drafter: DraftScheduler, method: DraftingMethod, target: VerificationScheduler, engine: StepEngine
) -> Iterator[CommittedTokens]:
    """Yields the committed tokens of one session, round by round, until the session ends."""
    now = 0.0
    schedulers: dict[str, Scheduler] = {DRAFTER: drafter, TARGET: target}

    def deliver(sender: str, sends: Iterable[Send]) -> Iterator[CommittedTokens]:
        for receiver, message in sends:
            if receiver == ROUTER:
                yield from carry_out(session.receive(sender, message))
            else:
                yield from deliver(receiver, schedulers[receiver].receive(sender, message, now))

    def carry_out(commands: Iterable[Command]) -> Iterator[CommittedTokens]:
        for command in commands:
            if isinstance(command, CommittedTokens):
                yield command
            elif isinstance(command, ToTarget | ToDrafter):
                yield from deliver(ROUTER, [(command.address, command.message)])

    yield from carry_out(session.assign_target(TARGET))
    yield from carry_out(session.assign_drafter(DRAFTER) if session.wants_drafter else ())
    while session.phase is Phase.RUNNING:
        proposals = make_pass(method, drafter.next_pass(limit=1, lookahead_limit=0), interrupted=lambda: False)
        yield from deliver(DRAFTER, drafter.proposed(proposals, now))
        plan = target.plan(now)
        assert plan is not None, "the scheduler must not wait: all blocks have arrived"
        now += STEP_S
        yield from deliver(TARGET, target.apply(engine.step(plan), STEP_S, now))
    apply_updates(method, drafter.next_pass(limit=0, lookahead_limit=0).updates)
